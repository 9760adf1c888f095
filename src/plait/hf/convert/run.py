"""One conversion: what is opened how, what is written where, and what goes along."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from plait.checkpoint.folder import begin_folder, check_replaceable, discard_folder, publish_folder
from plait.checkpoint.shards import DEFAULT_FILE_BYTES
from plait.checkpoint.spec import TensorSpec
from plait.config.hf.write import build_hf_config
from plait.contract.model import derive_plan
from plait.contract.parameter import derive_parameters_ownership
from plait.errors import ConfigError
from plait.hf.convert import origin as origins
from plait.hf.convert.adapter import merge, write_adapter
from plait.hf.convert.origin import SIDE_FOLDER, Origin
from plait.hf.convert.tokenizer import copy_tokenizer
from plait.hf.convert.write import derive_spec, write_sharded, write_weights
from plait.hf.directory.side_files import copy_side_files, write_json
from plait.hf.directory.source import derive_part_shape
from plait.sharding import Ownership

Form = Literal["hf", "plait", "native"]
"""A Hugging Face directory, a checkpoint of ours of the same model, or one of the Llama or GPT-2 family of ours."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Request:
    """What to convert, and into what."""

    source: Path
    target: Path
    form: Form | None = None
    """The other one of directory and checkpoint, unless given."""
    tp: int = 1
    """For how many tp ranks a checkpoint of ours is cut; it can be read at any degree."""
    dtype: torch.dtype | None = None
    """Of floating-point tensors; that of the source unless given."""
    max_file_bytes: int = DEFAULT_FILE_BYTES
    overwrite: bool = False
    is_merged: bool = False
    """Of adapters: whether the whole model with these in it is wanted, and not the adapters alone."""


@dataclass(frozen=True)
class Result:
    """What was written."""

    target: str
    form: Form
    parameters: int
    size_bytes: int
    notes: tuple[str, ...] = ()
    """What the user should know."""

    def to_json(self) -> dict[str, Any]:
        """For printing."""
        return {key: value for key, value in asdict(self).items() if key != "notes"}


StartProgress = Callable[[int], Callable[[int], None]]
"""Given the bytes of all, gives what to call with the bytes that were written."""


def convert(request: Request, start_progress: StartProgress) -> Result:
    """Convert. The target appears complete or not at all.

    Raises:
        ConfigError: the source is no model that can be converted into that.
        CheckpointError: the source is damaged, or the target exists or cannot be written.
    """
    check_replaceable(request.target, overwrite=request.overwrite)
    _check_apart(request)
    is_directory = origins.is_directory(request.source)
    form: Form = request.form or ("plait" if is_directory else "hf")
    origin = _open(request.source, form, is_directory=is_directory)
    if request.is_merged:
        _check_mergeable(origin, form)
        origin = merge(origin)
    if request.dtype is not None and (origin.hf_config or {}).get("quantization_config"):
        raise ConfigError(
            f"{origin.path}: its weights are quantized (quantization_config), so their dtype is not to be changed",
            hint="leave --dtype out, or have the library that quantized them give them back",
        )
    total = sum(derive_spec(origin.source, fqn, request.dtype).size_bytes for fqn in origin.stored)
    writing = begin_folder(request.target, overwrite=request.overwrite)
    try:
        advance = start_progress(total)
        if form == "hf" and origin.lora is not None:
            specs, notes = write_adapter(origin, writing, request.dtype, advance), list[str]()
        elif form == "hf":
            specs, notes = _write_directory(origin, writing, request, advance)
        else:
            specs, notes = _write_checkpoint(origin, writing, request, advance)
        publish_folder(writing, request.target)
    except BaseException:
        discard_folder(writing)
        raise
    parameters = sum(spec.numel for spec in specs.values())
    size_bytes = sum(spec.size_bytes for spec in specs.values())
    return Result(str(request.target), form, parameters, size_bytes, tuple(notes))


def _check_mergeable(origin: Origin, form: Form) -> None:
    if origin.lora is None or form != "hf":
        what = "is no checkpoint of adapters" if origin.lora is None else "is merged into a Hugging Face directory only"
        raise ConfigError(f"{origin.path}: {what}, so there is nothing to merge", hint="leave --merge out")


def _check_apart(request: Request) -> None:
    source, target = request.source.resolve(), request.target.resolve()
    if source == target or target in source.parents or source in target.parents:
        raise ConfigError(f"{request.target}: lies in {request.source}, or the other way round", hint="keep them apart")


def _open(path: Path, form: Form, *, is_directory: bool) -> Origin:
    if is_directory:
        opened = {"hf": origins.open_as_files, "plait": origins.open_as_model, "native": origins.open_as_native}
        return opened[form](path)
    origin = origins.open_checkpoint(path)
    if form == "native" and origin.native is None:
        raise ConfigError(
            f"{path}: is a checkpoint of a model of transformers, not of a native one",
            hint="convert it to a Hugging Face directory first, and that with --to native",
        )
    return origin


def _write_directory(
    origin: Origin, folder: Path, request: Request, advance: Callable[[int], None]
) -> tuple[dict[str, TensorSpec], list[str]]:
    specs = write_weights(origin, folder, dtype=request.dtype, max_file_bytes=request.max_file_bytes, advance=advance)
    names = [] if origin.side_files is None else copy_side_files(origin.side_files, folder)
    end_of_text, notes = None, list[str]()
    if origin.hf_config is None:
        end_of_text, notes = copy_tokenizer(origin, folder)
    elif not any(name.startswith(("tokenizer", "vocab")) for name in names):
        notes = ["no tokenizer files were found, so none are in the directory"]
    write_json(folder / "config.json", _build_config(origin, specs, request, end_of_text))
    return specs, notes


def _build_config(
    origin: Origin, specs: dict[str, TensorSpec], request: Request, end_of_text: int | None
) -> dict[str, Any]:
    dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs.values() if spec.dtype.is_floating_point})
    if origin.hf_config is None:
        assert origin.native is not None, origin.path
        return build_hf_config(origin.native, dtype=dtypes[0], end_of_text=end_of_text)
    is_changed = request.dtype is not None or origin.state
    config = {key: value for key, value in origin.hf_config.items() if not (is_changed and key == "torch_dtype")}
    return {**config, "dtype": dtypes[0]} if is_changed and len(dtypes) == 1 else config


def _write_checkpoint(
    origin: Origin, folder: Path, request: Request, advance: Callable[[int], None]
) -> tuple[dict[str, TensorSpec], list[str]]:
    ownership = derive_ownership(origin, request.tp)
    state = {
        "config": origin.state.get("config") or {"model": _describe_model(origin)},
        "hf_config": origin.hf_config,
        "converted_from": str(origin.path),
    }
    specs = write_sharded(
        origin, folder, ownership, degree=request.tp, dtype=request.dtype, state=state, advance=advance
    )
    if origin.side_files is not None:
        (folder / SIDE_FOLDER).mkdir()
        copy_side_files(origin.side_files, folder / SIDE_FOLDER)
    return specs, []


def derive_ownership(origin: Origin, tp: int) -> dict[str, Ownership]:
    """How a checkpoint is cut for `tp` ranks: as they own it in training.

    Raises:
        ConfigError: the model cannot be cut over so many ranks.
    """
    if origin.native is None:
        assert origin.anatomy is not None, origin.path
        return origin.anatomy.derive_ownership(tp)
    shapes = {fqn: derive_part_shape(stored) for fqn, stored in origin.stored.items()}
    return derive_parameters_ownership(shapes, derive_plan(origin.native, sequence_parallel=True), tp)


def _describe_model(origin: Origin) -> dict[str, Any]:
    if origin.native is not None:
        return {"family": origin.native.family, **origin.native.model_dump(mode="json")}
    return {"family": "hf", "path": str(origin.path)}
