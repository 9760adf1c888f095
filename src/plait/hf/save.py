"""A parallel model to a Hugging Face directory that everybody else reads: whole tensors, true sizes, no padding."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.folder import begin_folder, discard_folder, publish_folder, write_text, writing_folder
from plait.checkpoint.shards import (
    DEFAULT_FILE_BYTES,
    METADATA,
    WEIGHT_INDEX,
    build_weight_index,
    plan_files,
)
from plait.checkpoint.spec import TensorSpec, sort_names
from plait.checkpoint.stream import TensorWriter
from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.errors import CheckpointError, ConfigError, PlaitError
from plait.hf.directory.side_files import copy_side_files
from plait.hf.directory.source import take_part
from plait.hf.load import list_stored
from plait.hf.lora.layers import is_adapter
from plait.hf.stored import Stored
from plait.parallel.apply import ownership_of
from plait.parallel.shard import gather_tensor
from plait.sharding import Ownership

Parts = Mapping[str, list[tuple[str, Stored]]]
"""By name in the directory, which parameters of the model are stored there."""


def save_pretrained(
    model: nn.Module,
    path: str | Path,
    mesh: Mesh,
    *,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    source: str | Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Save weights, config and, from the directory `source`, tokenizer files, on every rank of the mesh.

    Every rank writes some of the files. A tensor is put together by one collective, is written, and is let go: beside
    its own part a rank holds one tensor at a time. The directory gets its name when all of it is on disk.

    Raises:
        ConfigError: the model has adapters.
        CheckpointError: on every rank: the directory exists already, or some rank could not write.
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        hint = "save_adapter of plait.hf.lora.files writes the adapters; `plait convert --merge` the model with them"
        raise ConfigError(f"{type(model).__name__} has adapters, which a directory of weights does not hold", hint=hint)
    final = Path(path)
    writing = writing_folder(final)
    try:
        with together(mesh):
            if mesh.rank == 0:
                begin_folder(final, overwrite=overwrite)
        failure = _Saving(model, mesh, writing, max_file_bytes).write_files()
        with together(mesh):
            if failure is not None:
                raise failure
        with together(mesh):
            if mesh.rank == 0:
                write_config(model, writing)
                if source is not None:
                    copy_side_files(Path(source), writing)
                publish_folder(writing, final)
    except BaseException:
        if mesh.rank == 0:
            discard_folder(writing)
        raise
    return final


class _Saving:
    """The files of one save, spread over the ranks."""

    def __init__(self, model: nn.Module, mesh: Mesh, folder: Path, max_file_bytes: int) -> None:
        self._mesh, self._folder = mesh, folder
        stored = list_stored(model)
        self._tensors = dict(_list_tensors(model, stored))
        self._ownership = ownership_of(model)
        self._parts = group_parts(stored)
        self._specs = {
            name: TensorSpec(self._tensors[parts[0][0]].dtype, parts[0][1].shape) for name, parts in self._parts.items()
        }
        self._files = plan_files(self._specs, max_file_bytes)

    def write_files(self) -> PlaitError | None:
        """Write what falls to this rank, which joins every gather also where it cannot write, and then says so."""
        failure = None
        for number, (file, names) in enumerate(self._files.items()):
            if number % self._mesh.dp_cp.degree != self._mesh.dp_cp.rank:
                continue
            is_writer = (number // self._mesh.dp_cp.degree) % self._mesh.tp.degree == self._mesh.tp.rank
            failure = self._write_file(file, names, is_writer=is_writer and failure is None) or failure
        try:
            if len(self._files) > 1 and self._mesh.rank == 0 and failure is None:
                write_text(self._folder / WEIGHT_INDEX, build_weight_index(self._files, self._specs))
        except PlaitError as error:
            failure = error
        return failure

    def _write_file(self, file: str, names: list[str], *, is_writer: bool) -> PlaitError | None:
        specs = {name: self._specs[name] for name in names}
        left = iter(sort_names(specs))
        failure: PlaitError | None = None
        try:
            if is_writer:
                with TensorWriter(self._folder / file, specs, METADATA) as writer:
                    for name in left:
                        whole = self._assemble(name, is_writer=True)
                        assert whole is not None, name
                        writer.write(name, whole)
        except PlaitError as error:
            failure = error
        except (RuntimeError, MemoryError) as error:  # no memory for a whole tensor; the others wait for the rest
            failure = CheckpointError(f"{self._folder / file}: cannot be written ({error})")
        for name in left:
            self._assemble(name, is_writer=False)
        return failure

    def _assemble(self, name: str, *, is_writer: bool) -> Tensor | None:
        """Put a tensor together, on the rank that writes it; the others give their part."""
        spec, parts = self._specs[name], self._parts[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype) if is_writer and len(parts) > 1 else None
        for fqn, stored in parts:
            part = gather_tensor(self._tensors[fqn].detach(), self._owner(fqn), self._mesh)
            if whole is not None:
                take_part(whole, stored).copy_(part)
            elif is_writer:
                return part.t() if stored.is_transposed and part.dim() > 1 else part
        return whole

    def _owner(self, fqn: str) -> Ownership:
        return self._ownership.get(fqn) or Ownership(fqn, tuple(self._tensors[fqn].shape))


def group_parts(stored: Mapping[str, Stored]) -> Parts:
    """The parameters that share a tensor of the checkpoint, by its name, in the model's order."""
    parts: dict[str, list[tuple[str, Stored]]] = {}
    for fqn, each in stored.items():
        parts.setdefault(each.name, []).append((fqn, each))
    return parts


def write_config(model: nn.Module, folder: Path) -> None:
    """Write `config.json` and `generation_config.json` of a model of transformers.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    config: Any = copy.deepcopy(model.config)
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config.architectures = [_find_architecture(model)]
    try:
        config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: the config cannot be written ({error})") from error


def _find_architecture(model: nn.Module) -> str:
    """The class of transformers that the model is of."""
    kinds = (kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    return next(kinds, type(model).__name__)


def _list_tensors(model: nn.Module, stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return ((fqn, named[fqn]) for fqn in stored)
