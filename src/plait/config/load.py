"""From a file, a preset or a Hugging Face folder, and overrides, to a checked run config."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.config.data import DataConfig
from plait.config.hf import load_hf_fields
from plait.config.model import GptConfig, Llama3RopeScaling, LlamaConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.presets import list_presets, load_preset
from plait.config.problem import Problem, describe_nearest, list_problems
from plait.config.run import RunConfig, list_conflicts
from plait.config.section import Section
from plait.config.toml import load_overrides, load_toml, merge_trees
from plait.config.train import TrainConfig
from plait.errors import ConfigError

_SECTIONS: dict[str, type[Section]] = {
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "train": TrainConfig,
}
_FAMILIES: dict[str, type[LlamaConfig] | type[GptConfig]] = {"llama": LlamaConfig, "gpt": GptConfig}


def load_run_config(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a TOML file, a preset by its name, or a Hugging Face `config.json` or its folder.

    `[model] preset = "..."` names any of the last three; further keys of `[model]` override it.

    Raises:
        ConfigError: every problem at once, those of file and overrides together.
    """
    tree = _load_source(source)
    over, problems = load_overrides(overrides)
    tree = merge_trees(tree, over)
    sections: dict[str, Section] = {}
    problems += _build_sections(tree, sections)
    if not problems:
        return RunConfig(**tree | sections)
    raise _build_error(source, tree, over, problems)
