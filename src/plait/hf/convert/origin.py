"""What is to be converted: a Hugging Face directory or a checkpoint of ours, its tensors by the FQN they shall have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from plait.checkpoint.names import INDEX, find_latest
from plait.checkpoint.read import Checkpoint
from plait.checkpoint.shards import SINGLE_FILE, WEIGHT_INDEX
from plait.checkpoint.weights import WeightFiles
from plait.config.hf.lora import LoraConfig
from plait.config.hf.read import load_hf_fields, load_hf_json
from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.errors import CheckpointError, ConfigError
from plait.hf.adapters import add_adapters
from plait.hf.convert.parts import Anatomy
from plait.hf.directory.names import Match, Naming
from plait.hf.directory.native import list_native_stored
from plait.hf.directory.skeleton import build_from_config, build_skeleton
from plait.hf.directory.source import DirectorySource, ShardedSource, Source, derive_part_shape
from plait.hf.library import build_config
from plait.hf.load import derive_naming, open_stored
from plait.hf.lora.files import list_files_of_adapter
from plait.hf.stored import Stored

NativeModel = LlamaConfig | GptConfig

SIDE_FOLDER = "hf"
"""In a checkpoint of ours, where the files of the directory it comes from are."""


@dataclass(frozen=True)
class Origin:
    """A model to be converted."""

    path: Path
    source: Source
    stored: Mapping[str, Stored]
    """Where each tensor, by FQN, is in a Hugging Face directory; the order is that of the model."""
    native: NativeModel | None
    """The config of one of our own families; None for a model of transformers."""
    hf_config: Mapping[str, Any] | None
    """The fields of `config.json`; None for a model of ours that never had one."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Of a checkpoint of ours: the run that wrote it."""
    side_files: Path | None = None
    """Where tokenizer and chat template are."""
    anatomy: Anatomy | None = None
    """Of a model of transformers: what a checkpoint of ours holds of it, and how that is cut."""
    lora: LoraConfig | None = None
    """Of a checkpoint that holds adapters, and of the model around them nothing."""


def is_directory(path: Path) -> bool:
    """Whether `path` is a Hugging Face directory, usable or not; false for a checkpoint of ours.

    Raises:
        ConfigError: it is neither.
    """
    if (path / INDEX).is_file():
        return False
    if any((path / name).is_file() for name in ("config.json", SINGLE_FILE, WEIGHT_INDEX)):
        return True
    what = (
        "is neither a Hugging Face directory nor a checkpoint of plait" if path.is_dir() else "there is no such folder"
    )
    latest = next(filter(None, (find_latest(path), find_latest(path / "checkpoints"))), None)
    hint = f"the newest checkpoint there is {latest}" if latest else f"one has a config.json, the other an {INDEX}"
    raise ConfigError(f"{path}: {what}", hint=hint)


def open_as_files(path: Path) -> Origin:
    """A Hugging Face directory, its tensors as they are in its files."""
    hf_config = load_hf_json(path / "config.json")
    files = WeightFiles.from_folder(path)
    stored = {name: Stored(name, entry.spec.shape) for name, entry in files.entries.items()}
    source = DirectorySource(files, stored, Match({name: name for name in stored}, ()))
    return Origin(path, source, stored, None, hf_config, side_files=path)


def open_as_native(path: Path) -> Origin:
    """A Hugging Face directory of Llama, Qwen2 or GPT-2, as a model of our own family."""
    native = build_native_config(load_hf_fields(path), str(path / "config.json"))
    stored = list_native_stored(native)
    tied = {"lm_head.weight": stored["embedding.weight"].name} if native.tied_embeddings else {}
    prefix = "transformer." if isinstance(native, GptConfig) else "model."
    source = open_stored(path, stored, Naming(prefix, tied))
    source.check_twins()
    return Origin(path, source, stored, native, load_hf_json(path / "config.json"), side_files=path)


def open_as_model(path: Path) -> Origin:
    """A Hugging Face directory that can be made parallel, its tensors as the parallel model has them."""
    skeleton = build_skeleton(path)
    naming = derive_naming(skeleton)
    anatomy = Anatomy.of(skeleton)
    source = open_stored(path, anatomy.stored, naming)
    source.check_twins()
    hf_config = load_hf_json(path / "config.json")
    return Origin(path, source, anatomy.stored, None, hf_config, side_files=path, anatomy=anatomy)


def open_checkpoint(path: Path) -> Origin:
    """A checkpoint of ours: of `plait train`, or of `plait convert`.

    Raises:
        CheckpointError: it is damaged, or does not say of what model it is.
    """
    checkpoint = Checkpoint.from_folder(path)
    checkpoint.index.check_files(path, checkpoint.index.files)
    run_state = checkpoint.index.state
    try:
        fields: dict[str, Any] = dict(run_state["config"]["model"])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not say of what model it is ({error!r})") from error
    hf_config, lora = run_state.get("hf_config"), None
    if fields.get("family") == "hf":
        if not isinstance(hf_config, Mapping):
            raise CheckpointError(f"{path}: does not hold the config.json of its model")
        native = None
        skeleton = build_from_config(build_config(hf_config, str(path)))
        if fields.get("lora") is not None:
            lora = LoraConfig.model_validate(fields["lora"])
            add_adapters(skeleton, lora)
        anatomy = Anatomy.of(skeleton)
        stored = anatomy.stored if lora is None else list_files_of_adapter(anatomy.stored)
    else:
        anatomy = None
        native = build_native_config(fields, str(path / INDEX))
        stored = list_native_stored(native)
    source = ShardedSource(checkpoint)
    _check_complete(path, source, stored)
    side_files = _find_side_files(path, fields)
    return Origin(path, source, stored, native, hf_config, run_state, side_files, anatomy, lora)


def build_native_config(fields: Mapping[str, Any], where: str) -> NativeModel:
    """The config of one of our families.

    Raises:
        ConfigError: the fields are not valid.
    """
    try:
        adapter: TypeAdapter[NativeModel] = TypeAdapter(ModelConfig)
        return adapter.validate_python(dict(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _check_complete(path: Path, source: ShardedSource, stored: Mapping[str, Stored]) -> None:
    held = set(source.fqns)
    problems = [
        *(f"{fqn} is not in it" for fqn in stored if fqn not in held),
        *(f"{fqn} is in it, and the model has no such tensor" for fqn in sorted(held - stored.keys())),
        *(
            f"{fqn} is {list(source.spec(fqn).shape)} in it, and {list(derive_part_shape(each))} in the model"
            for fqn, each in stored.items()
            if fqn in held and source.spec(fqn).shape != derive_part_shape(each)
        ),
    ]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems[:5])
        raise CheckpointError(f"{path}: does not hold the model that it says{listed}")


def _find_side_files(path: Path, fields: Mapping[str, Any]) -> Path | None:
    """Those kept in the checkpoint, or those of the directory that was fine-tuned, if it is still there."""
    candidates = [path / SIDE_FOLDER, *([Path(fields["path"])] if "path" in fields else [])]
    return next((folder for folder in candidates if folder.is_dir()), None)
