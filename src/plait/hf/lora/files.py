"""Adapters as peft keeps them in a directory: `adapter_model.safetensors`, whole tensors, and `adapter_config.json`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.folder import begin_folder, discard_folder, publish_folder, writing_folder
from plait.checkpoint.safetensors import PieceReader
from plait.checkpoint.shards import METADATA
from plait.checkpoint.spec import TensorSpec, sort_names
from plait.checkpoint.stream import TensorWriter
from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.errors import CheckpointError, ConfigError
from plait.hf.directory.source import locate, take_part
from plait.hf.lora.layers import is_adapter, unwrap
from plait.hf.stored import Stored, stored_of
from plait.parallel.apply import ownership_of
from plait.parallel.shard import gather_tensor

WEIGHTS = "adapter_model.safetensors"

NAME = "default"
"""Of the adapter that is trained and written, as peft names it unless told otherwise."""

_PREFIX = "base_model.model."


def list_files_of_adapter(stored: Mapping[str, Stored], name: str = NAME) -> dict[str, Stored]:
    """Where each parameter of adapter `name` is in peft's file, which leaves the name of the adapter out."""
    return {
        fqn: replace(place, name=_PREFIX + place.name.replace(f".{name}.", "."))
        for fqn, place in stored.items()
        if is_adapter(fqn) and name in fqn.split(".")
    }


@torch.no_grad()
def load_adapter(model: nn.Module, path: str | Path, mesh: Mesh, *, name: str = NAME) -> None:
    """Fill the adapter of a parallel model with this rank's part of what is in a directory of peft.

    Raises:
        CheckpointError: on every rank: a damaged file, or tensors of another adapter; nothing is changed.
    """
    stored, ownership = list_files_of_adapter(stored_of(model), name), ownership_of(model)
    with together(mesh):
        reader = open_adapter(Path(path), stored)
    with together(mesh):
        for fqn, place in stored.items():
            target = model.get_parameter(fqn)
            if target.numel():
                target.copy_(reader.read(WEIGHTS, place.name, locate(place, ownership[fqn].intervals(mesh.tp.rank))))


def open_adapter(folder: Path, stored: Mapping[str, Stored]) -> PieceReader:
    """The file of an adapter that is to hold `stored`.

    Raises:
        CheckpointError: a damaged file, or tensors that are not these.
    """
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: has no {WEIGHTS}", hint="give a directory that peft or plait convert wrote")
    reader = PieceReader(folder)
    held = reader.list_tensors(WEIGHTS)
    wanted = {place.name: place.shape for place in stored.values()}
    problems = [
        *(f"{name} is not in it" for name in wanted if name not in held),
        *(f"{name} is in it, and the model has no such adapter" for name in held if name not in wanted),
        *(
            f"{name} is {list(held[name].shape)} in it, and {list(shape)} in the model"
            for name, shape in wanted.items()
            if name in held and held[name].shape != shape
        ),
    ]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems[:5])
        raise CheckpointError(f"{folder / WEIGHTS}: does not hold the adapters of this model{listed}")
    return reader


def save_adapter(
    model: nn.Module, path: str | Path, mesh: Mesh, *, name: str = NAME, base: str | Path = "", overwrite: bool = False
) -> Path:
    """Write an adapter of a parallel model as peft would, on every rank of the mesh; `base` is the directory it is for.

    Rank 0 writes what one collective a tensor puts together on every rank: adapters are small.

    Raises:
        ConfigError: the model has no such adapter.
        CheckpointError: on every rank: the directory exists already, or cannot be written.
    """
    final, writing = Path(path), writing_folder(Path(path))
    stored = list_files_of_adapter(stored_of(model), name)
    if not stored:
        raise ConfigError(f"{type(model).__name__} has no adapter {name!r}")
    try:
        with together(mesh):
            if mesh.rank == 0:
                begin_folder(final, overwrite=overwrite)
        with together(mesh):
            whole = _gather(model, stored, mesh)
            if mesh.rank == 0:
                write_tensors(writing / WEIGHTS, whole)
                write_adapter_config(getattr(unwrap(model), "peft_config")[name], writing, base)  # noqa: B009
                publish_folder(writing, final)
    except BaseException:
        if mesh.rank == 0:
            discard_folder(writing)
        raise
    return final


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file.

    Raises:
        CheckpointError: it cannot be written.
    """
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorWriter(path, specs, METADATA) as writer:
        for name in sort_names(specs):
            writer.write(name, tensors[name])


def write_adapter_config(config: Any, folder: Path, base: str | Path) -> None:
    """Write `adapter_config.json`.

    Raises:
        CheckpointError: it cannot be written.
    """
    config.base_model_name_or_path = str(base) or None
    config.inference_mode = True
    try:
        config.save_pretrained(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: the config cannot be written ({error.strerror})") from error


def _gather(model: nn.Module, stored: Mapping[str, Stored], mesh: Mesh) -> dict[str, Tensor]:
    """Whole tensors by their names in the file."""
    ownership, whole = ownership_of(model), dict[str, Tensor]()
    for fqn, place in stored.items():
        param = model.get_parameter(fqn).detach()
        target = whole.setdefault(place.name, torch.empty(place.shape, dtype=param.dtype, device=param.device))
        take_part(target, place).copy_(gather_tensor(param, ownership[fqn], mesh))
    return whole
