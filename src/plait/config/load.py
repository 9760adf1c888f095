"""From a source and `key=value` overrides to a checked run config."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.config.axis.context import ContextConfig
from plait.config.axis.pipeline import PipelineConfig
from plait.config.conflicts import list_conflicts
from plait.config.data import DataConfig
from plait.config.file.source import derive_model_fields, load_source
from plait.config.file.toml import expand_shorthands, load_overrides, merge_trees
from plait.config.hf.checkpoint import TOKENIZER, CheckpointModel, derive_checkpoint_fields
from plait.config.hf.lora import LoraConfig
from plait.config.model import FAMILIES, Llama3RopeScaling
from plait.config.overlap import SHORTHAND, OverlapConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.quantization import SHORTHAND as RECIPE
from plait.config.quantization import OperandConfig, QuantizationConfig
from plait.config.run import AnyRun, FineTuneConfig, RunConfig
from plait.config.section import Problem, Section, list_problems
from plait.config.train import TrainConfig
from plait.errors import ConfigError, describe_nearest

_SECTIONS: dict[str, type[Section]] = {
    "parallel": ParallelConfig,
    "pipeline": PipelineConfig,
    "context": ContextConfig,
    "overlap": OverlapConfig,
    "precision": PrecisionConfig,
    "quantization": QuantizationConfig,
    "data": DataConfig,
    "train": TrainConfig,
}

_OPERANDS: dict[str, type[Section]] = {
    f"quantization.{name}": OperandConfig for name in ("input", "weight", "gradient")
}

_MODELS: dict[str, type[Section]] = {**FAMILIES, "hf": CheckpointModel}

_SHORTHANDS = {"overlap": SHORTHAND, "quantization": RECIPE}
"""Sections that may be written as one plain value, and the key that it stands for."""


def load_run_config(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a TOML file, a preset by its name, or a Hugging Face `config.json` or its folder.

    In a file, `[model] preset` is a preset or Hugging Face path, and further keys of `[model]` override it. An override
    `model.preset=...` replaces the file's whole model.

    Raises:
        ConfigError: every problem at once, those of the file and of the overrides together.
    """
    tree, over, problems = _load_tree(source, overrides)
    if "path" in _get_table(tree, "model"):
        hint = "model.preset=DIR takes the shape of a Hugging Face model, without its weights"
        text = "only `plait train` and `plait verify` take a Hugging Face directory"
        problems.append(Problem("model.path", text, hint))
        raise _build_error(source, tree, over, problems)
    config = _build_checked(RunConfig, source, tree, over, problems)
    assert isinstance(config, RunConfig)
    return config


def load_training_config(source: str, overrides: Sequence[str] = ()) -> RunConfig | FineTuneConfig:
    """As `load_run_config`, where `[model] path` may be a Hugging Face directory, whose weights are trained further.

    Text is then turned into tokens by the tokenizer of that directory unless `data.tokenizer` is given.

    Raises:
        ConfigError: every problem at once, those of the file and of the overrides together.
    """
    tree, over, problems = _load_tree(source, overrides)
    kind = FineTuneConfig if "path" in _get_table(tree, "model") else RunConfig
    config = _build_checked(kind, source, tree, over, problems)
    assert isinstance(config, RunConfig | FineTuneConfig)
    return config


def _load_tree(source: str, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """Everything that was given, and of that the overrides."""
    over, problems = load_overrides(overrides, _SHORTHANDS)
    tree = expand_shorthands(load_source(source), _SHORTHANDS)
    if not {"preset", "path"}.isdisjoint(_get_table(over, "model")):
        tree.pop("model", None)
    return merge_trees(tree, over), over, problems


def _build_checked(
    kind: type[AnyRun], source: str, tree: dict[str, Any], over: Mapping[str, Any], problems: list[Problem]
) -> AnyRun:
    config, found = _build_run_config(kind, _add_tokenizer(tree))
    problems += found
    if config is None or problems:
        raise _build_error(source, tree, over, problems)
    return config


def _add_tokenizer(tree: dict[str, Any]) -> dict[str, Any]:
    """Text for a Hugging Face directory is turned into tokens by its own tokenizer."""
    path, data = _get_table(tree, "model").get("path"), _get_table(tree, "data")
    if not isinstance(path, str) or not data or "tokenizer" in data or data.get("kind") == "tokens":
        return tree
    return {**tree, "data": {**data, "tokenizer": str(Path(path) / TOKENIZER)}}


def _build_run_config(kind: type[AnyRun], tree: Mapping[str, Any]) -> tuple[AnyRun | None, list[Problem]]:
    resolved = dict(tree)
    problems: list[Problem] = []
    if isinstance(tree.get("model", {}), Mapping):
        table = _get_table(tree, "model")
        model = derive_checkpoint_fields(table) if kind is FineTuneConfig else derive_model_fields(table)
        if isinstance(model, Problem):
            problems.append(model)
            resolved.pop("model", None)
        else:
            resolved["model"] = model
    resolved, unknown = _drop_unknown_keys(resolved)
    problems += unknown
    try:
        return kind.model_validate(resolved), problems
    except ValidationError as error:
        problems += [problem for problem in list_problems(error) if problem != Problem("model", "is required")]
    conflicts = list_conflicts(_build_valid_sections(resolved))
    return None, list(dict.fromkeys([*problems, *conflicts]))


def _drop_unknown_keys(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Leave only what a config has, so that a misspelt key does not hide other problems of its section."""
    kinds: dict[str, type[Section]] = {"": RunConfig, **_SECTIONS, **_OPERANDS}
    family = _get_table(tree, "model").get("family")
    if family in _MODELS:
        kinds |= {"model": _MODELS[family], "model.rope_scaling": Llama3RopeScaling, "model.lora": LoraConfig}

    def clean(table: Mapping[str, Any], section: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in table.items():
            key = f"{section}.{name}".lstrip(".")
            if section in kinds and name in kinds[section].renamed:
                problems.append(kinds[section].renamed[name].within(section))
            elif section in kinds and name not in kinds[section].model_fields:
                problems.append(Problem(key, "unknown key", _describe_nearest_key(name, section, kinds)))
            else:
                kept[name] = clean(value, key) if isinstance(value, Mapping) else value
        return kept

    problems: list[Problem] = []
    return clean(tree, ""), problems


def _describe_nearest_key(name: str, section: str, kinds: Mapping[str, type[Section]]) -> str:
    """The key of that very name in another section (`parallel.tp` for `tp`), or else the nearest in `section`."""
    elsewhere = [f"{other}.{name}".lstrip(".") for other, kind in kinds.items() if name in kind.model_fields]
    if elsewhere:
        return describe_nearest(name, elsewhere, cutoff=0)
    return describe_nearest(name, kinds[section].model_fields)


def _build_valid_sections(tree: Mapping[str, Any]) -> dict[str, Section]:
    """The sections that can be built, to be compared with each other although another one cannot."""
    kinds = dict(_SECTIONS)
    if "family" in _get_table(tree, "model"):
        kinds["model"] = _MODELS[tree["model"]["family"]]
    sections: dict[str, Section] = {}
    for name, kind in kinds.items():
        with suppress(ValidationError):
            sections[name] = kind.model_validate(tree.get(name, {}))
    return sections


def _build_error(
    source: str, tree: Mapping[str, Any], over: Mapping[str, Any], problems: Sequence[Problem]
) -> ConfigError:
    """One error with every problem; a single one keeps its hint apart."""
    if len(problems) == 1:
        return ConfigError(f"{source}: {_describe(problems[0], tree, over)}", hint=problems[0].hint)
    described = [
        _describe(problem, tree, over) + (f" ({problem.hint})" if problem.hint else "") for problem in problems
    ]
    return ConfigError.from_problems(source, described)


def _describe(problem: Problem, tree: Mapping[str, Any], over: Mapping[str, Any]) -> str:
    """`parallel.tp = 16 (command line): <text>`."""
    value = _look_up(tree, problem.key)
    shown = "" if value is None or isinstance(value, Mapping) else f" = {json.dumps(value, default=str)}"
    origin = "" if _look_up(over, problem.key) is None else " (command line)"
    return f"{problem.key}{shown}{origin}: {problem.text}"


def _look_up(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit():
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _get_table(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = tree.get(key)
    return table if isinstance(table, Mapping) else {}
