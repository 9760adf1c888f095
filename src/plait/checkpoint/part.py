"""One rank's part of a checkpoint: it writes what is its own to write, and reads what it owns, however that was cut."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.index import Index, Piece, TensorRecord
from plait.checkpoint.safetensors import PieceReader, save_tensors
from plait.errors import CheckpointError
from plait.sharding import Interval, Ownership


@dataclass(frozen=True)
class Owned:
    """What this rank holds of one tensor: the same record for every way in which a mesh cuts tensors."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    intervals: tuple[Interval, ...]
    """What `tensor` is of it: one for every dim."""
    tensor: Tensor
    is_written: bool
    """Whether this rank, of all that hold these elements, is the one that writes them."""


def build_owned(ownership: Ownership, tensor: Tensor, tp_rank: int = 0, *, is_first_replica: bool = True) -> Owned:
    """The record of a tensor that is cut over tp alone, and held by several tp groups of which one writes it."""
    is_written = is_first_replica and ownership.is_counted_on(tp_rank)
    return Owned(ownership.shape, ownership.intervals(tp_rank), tensor, is_written)


Tensors = Mapping[str, Owned]
"""By name in the checkpoint."""

Written = Mapping[str, TensorRecord]
"""What one rank wrote: of each tensor the one piece."""


def save_part(folder: Path, tensors: Tensors, file: str) -> tuple[int, Written]:
    """Write what this rank writes; return the bytes of the file, and what is in it.

    Raises:
        CheckpointError: it cannot be written.
    """
    written = {name: owned for name, owned in tensors.items() if owned.is_written and owned.tensor.numel()}
    records = {
        name: TensorRecord(owned.shape, str(owned.tensor.dtype).removeprefix("torch."), (Piece(file, owned.intervals),))
        for name, owned in written.items()
    }
    size_bytes = save_tensors(folder / file, {name: owned.tensor for name, owned in written.items()}) if written else 0
    return size_bytes, records


def build_index(step: int, state: Mapping[str, Any], parts: Iterable[tuple[int, Written]]) -> Index:
    """The index of what all ranks wrote, in rank order."""
    records: dict[str, TensorRecord] = {}
    files: dict[str, int] = {}
    for size_bytes, written in parts:
        for name, record in written.items():
            before = records[name].pieces if name in records else ()
            records[name] = replace(record, pieces=(*before, *record.pieces))
            files[record.pieces[0].file] = size_bytes
    return Index(step, records, files, state)


def check_part(folder: Path, index: Index, tensors: Tensors) -> None:
    """Check that everything `tensors` needs is there, so that reading it does not fail half-way.

    Raises:
        CheckpointError: the checkpoint is of another model, or a file is damaged.
    """
    _check_fits(folder, index, tensors)
    expected: dict[str, dict[str, list[int]]] = {}
    for name in tensors:
        for piece in index.tensors[name].pieces:
            expected.setdefault(piece.file, {})[name] = [len(interval) for interval in piece.intervals]
    reader = PieceReader(folder)
    for file, shapes in expected.items():
        reader.check_file(file, shapes)


@torch.no_grad()
def load_part(folder: Path, index: Index, tensors: Tensors) -> None:
    """Fill `tensors`, read from as many files as hold some of it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    reader = PieceReader(folder)
    for name, owned in tensors.items():
        for piece in index.tensors[name].pieces:
            copy_overlap(reader, name, piece, owned.intervals, owned.tensor)


def _check_fits(folder: Path, index: Index, tensors: Tensors) -> None:
    kinds = {name.partition("/")[0] for name in tensors}
    saved = {name for name in index.tensors if name.partition("/")[0] in kinds}
    problems = [
        *(f"{name} is not in it" for name in tensors if name not in saved),
        *(f"{name} is in it, and the model has no such tensor" for name in sorted(saved - tensors.keys())),
        *(
            f"{name} is {list(index.tensors[name].shape)} in it, and {list(owned.shape)} in the model"
            for name, owned in tensors.items()
            if name in saved and index.tensors[name].shape != owned.shape
        ),
    ]
    if problems:
        more = [f"and {len(problems) - 4} more"] if len(problems) > 5 else []
        listed = "".join(f"\n  - {problem}" for problem in [*problems[: 4 if more else 5], *more])
        raise CheckpointError(
            f"{folder}: is a checkpoint of another model{listed}", hint="use the model config it was trained with"
        )


def copy_overlap(reader: PieceReader, name: str, piece: Piece, own: tuple[Interval, ...], target: Tensor) -> None:
    """Copy into `target`, which holds `own`, the elements of it that are in `piece`."""
    overlap = tuple(map(Interval.intersect, own, piece.intervals))
    if not all(map(len, overlap)):
        return
    source = reader.read(piece.file, name, _relative(overlap, piece.intervals))
    target[tuple(slice(i.start, i.stop) for i in _relative(overlap, own))].copy_(source)


def _relative(intervals: tuple[Interval, ...], origin: tuple[Interval, ...]) -> tuple[Interval, ...]:
    return tuple(Interval(i.start - o.start, i.stop - o.start) for i, o in zip(intervals, origin, strict=True))
