"""One rank's part of a checkpoint: it writes what it counts, and reads what it owns, written at any degree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.index import Index, Piece, TensorRecord, list_pieces
from plait.checkpoint.names import file_name
from plait.checkpoint.safetensors import PieceReader, save_tensors
from plait.errors import CheckpointError
from plait.sharding import Interval, Ownership


class Owned(NamedTuple):
    """This rank's part of one tensor, and who owns what of all of it."""

    ownership: Ownership
    tensor: Tensor


Tensors = Mapping[str, Owned]
"""By name in the checkpoint."""


def save_part(folder: Path, tensors: Tensors, rank: int, degree: int) -> int:
    """Write the file of tp rank `rank`, and return its bytes.

    Raises:
        CheckpointError: it cannot be written.
    """
    counted = {
        name: owned.tensor
        for name, owned in tensors.items()
        if owned.ownership.is_counted_on(rank) and owned.tensor.numel()
    }
    return save_tensors(folder / file_name(rank, degree), counted)


def build_index(step: int, tensors: Tensors, state: Mapping[str, Any], size_bytes: list[int]) -> Index:
    """The index of the files that as many ranks wrote as there are sizes; the same on each of them."""
    degree = len(size_bytes)
    records = {
        name: TensorRecord(
            owned.ownership.shape,
            str(owned.tensor.dtype).removeprefix("torch."),
            list_pieces(owned.ownership, degree),
        )
        for name, owned in tensors.items()
    }
    return Index(step, records, {file_name(rank, degree): size for rank, size in enumerate(size_bytes)}, state)


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
def load_part(folder: Path, index: Index, tensors: Tensors, rank: int) -> None:
    """Fill `tensors` with what tp rank `rank` owns, read from as many files as hold some of it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    reader = PieceReader(folder)
    for name, owned in tensors.items():
        own = owned.ownership.intervals(rank)
        for piece in index.tensors[name].pieces:
            copy_overlap(reader, name, piece, own, owned.tensor)


def _check_fits(folder: Path, index: Index, tensors: Tensors) -> None:
    kinds = {name.partition("/")[0] for name in tensors}
    saved = {name for name in index.tensors if name.partition("/")[0] in kinds}
    problems = [
        *(f"{name} is not in it" for name in tensors if name not in saved),
        *(f"{name} is in it, and the model has no such tensor" for name in sorted(saved - tensors.keys())),
        *(
            f"{name} is {list(index.tensors[name].shape)} in it, and {list(owned.ownership.shape)} in the model"
            for name, owned in tensors.items()
            if name in saved and index.tensors[name].shape != owned.ownership.shape
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
