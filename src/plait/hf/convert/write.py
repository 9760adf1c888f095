"""Writing what was opened: as a Hugging Face directory, or as a sharded checkpoint of ours."""

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from plait.checkpoint.folder import write_text
from plait.checkpoint.names import STATE, file_name, model_name
from plait.checkpoint.part import build_state_item, build_write_item
from plait.checkpoint.shards import METADATA, WEIGHT_INDEX, build_weight_index, plan_files
from plait.checkpoint.spec import TensorSpec, sort_names
from plait.checkpoint.stream import TensorWriter
from plait.checkpoint.write import Part, write_metadata, write_part
from plait.errors import CheckpointError
from plait.hf.convert.origin import Origin
from plait.hf.directory.source import Source, derive_part_shape, take_part
from plait.hf.save import group_parts
from plait.hf.stored import Stored
from plait.sharding import Interval, Ownership

Advance = Callable[[int], None]
"""Told of the bytes that have been written."""


def derive_spec(source: Source, fqn: str, dtype: torch.dtype | None) -> TensorSpec:
    """What is written of a tensor: numbers in `dtype` where that is given, everything else as it is."""
    spec = source.spec(fqn)
    return spec._replace(dtype=dtype) if dtype is not None and spec.dtype.is_floating_point else spec


def write_weights(
    origin: Origin, folder: Path, *, dtype: torch.dtype | None, max_file_bytes: int, advance: Advance
) -> dict[str, TensorSpec]:
    """Write the files of a Hugging Face directory and their index; return what is in them.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    parts = group_parts(origin.stored)
    specs = {
        name: derive_spec(origin.source, parts[0][0], dtype)._replace(shape=parts[0][1].shape)
        for name, parts in parts.items()
    }
    files = plan_files(specs, max_file_bytes)
    for file, names in files.items():
        held = {name: specs[name] for name in names}
        with TensorWriter(folder / file, held, METADATA) as writer:
            for name in sort_names(held):
                writer.write(name, assemble(origin.source, held[name], parts[name]))
                advance(held[name].size_bytes)
    if len(files) > 1:
        write_text(folder / WEIGHT_INDEX, build_weight_index(files, specs))
    return specs


def write_sharded(
    origin: Origin,
    folder: Path,
    ownership: Mapping[str, Ownership],
    *,
    degree: int,
    dtype: torch.dtype | None,
    state: Mapping[str, Any],
    advance: Advance,
) -> dict[str, TensorSpec]:
    """Write the files of a checkpoint for `degree` tp ranks, and their index; return what is in them.

    Raises:
        CheckpointError: a file cannot be read or written.
    """
    specs = {fqn: derive_spec(origin.source, fqn, dtype) for fqn in origin.stored}
    parts = [_write_rank(folder, rank, origin.source, ownership, specs, state, advance) for rank in range(degree)]
    write_metadata(folder, 0, state, parts)
    return specs


def _write_rank(
    folder: Path,
    rank: int,
    source: Source,
    ownership: Mapping[str, Ownership],
    specs: Mapping[str, TensorSpec],
    state: Mapping[str, Any],
    advance: Advance,
) -> Part:
    fqns = {model_name(fqn): fqn for fqn in specs if ownership[fqn].is_counted_on(rank)}
    items = [
        build_write_item(name, specs[fqn].shape, ownership[fqn].intervals(rank), specs[fqn].dtype)
        for name, fqn in fqns.items()
        if prod(ownership[fqn].local_shape(rank))
    ]

    def resolve(item: WriteItem) -> Tensor | dict[str, Any]:
        if item.index.fqn == STATE:
            return dict(state)
        fqn = fqns[item.index.fqn]
        piece = torch.empty(ownership[fqn].local_shape(rank), dtype=specs[fqn].dtype)
        source.copy_into(piece, fqn, ownership[fqn].intervals(rank))
        check_fits(piece, source.spec(fqn), fqn)
        advance(piece.nbytes)
        return piece

    return write_part(folder, file_name(rank), [*([build_state_item()] if rank == 0 else []), *items], resolve)


def assemble(source: Source, spec: TensorSpec, parts: list[tuple[str, Stored]]) -> Tensor:
    """The whole of one tensor of a directory."""
    whole = torch.empty(spec.shape, dtype=spec.dtype)
    for fqn, stored in parts:
        intervals = tuple(Interval(0, size) for size in derive_part_shape(stored))
        source.copy_into(take_part(whole, stored), fqn, intervals)
        check_fits(whole, source.spec(fqn), stored.name)
    return whole


def check_fits(cast: Tensor, held: TensorSpec, name: str) -> None:
    """Refuse values that became infinite by a cast from the dtype that the file holds.

    Raises:
        CheckpointError: some did.
    """
    if cast.dtype != held.dtype and cast.dtype.is_floating_point and cast.isinf().any():
        raise CheckpointError(
            f"{name}: has values that {str(cast.dtype).removeprefix('torch.')} cannot hold",
            hint="use --dtype bfloat16 or float32",
        )
