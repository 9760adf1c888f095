"""Saving and loading: each tp rank writes what it counts and reads what it owns, whatever degree it was written at."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.index import Index, Piece, TensorRecord, list_pieces
from plait.checkpoint.names import INDEX, file_name, folder_name, list_checkpoints, writing_name
from plait.checkpoint.safetensors import PieceReader, save_tensors, sync
from plait.comm.agree import share, together
from plait.comm.mesh import Mesh
from plait.errors import CheckpointError
from plait.sharding import Interval, Ownership


class Owned(NamedTuple):
    """This rank's part of one tensor, and who owns what of all of it."""

    ownership: Ownership
    tensor: Tensor


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, Owned],
    state: Mapping[str, Any],
    mesh: Mesh,
    *,
    keep: int = 0,
) -> Path:
    """Save a checkpoint, on every rank of the mesh, and return its folder.

    The tp ranks of dp rank 0 write a file each; every element is written once, at its true size. All of it goes to a
    folder beside that gets its name when it is complete, so that whatever fails, the checkpoints before it stay as
    they are. Then only the newest `keep` are kept (0: all).

    Raises:
        CheckpointError: on every rank, if any of them could not write.
    """
    writing, final = directory / writing_name(step), directory / folder_name(step)
    try:
        with together(mesh):
            if mesh.rank == 0:
                _build_folder(writing, final)
        with together(mesh):
            size_bytes = _save_own(writing, tensors, mesh)
        sizes = share(size_bytes, mesh)[: mesh.tp.degree]
        with together(mesh):
            if mesh.rank == 0:
                files = {file_name(rank, mesh.tp.degree): size for rank, size in enumerate(sizes)}
                _publish(writing, final, _build_index(step, tensors, state, files, mesh))
                _prune(directory, keep)
    except BaseException:
        if mesh.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise
    return final


def load_checkpoint(folder: Path, tensors: Mapping[str, Owned], mesh: Mesh) -> Index:
    """Fill this rank's `tensors` from a checkpoint, on every rank of the mesh, and return its index.

    The checkpoint may have been written at any tp degree. Names are taken by their first part: asking for `model/...`
    alone leaves the optimizer unread. Nothing is overwritten before all ranks have found everything they need.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or is not of this model.
    """
    reader = PieceReader(folder)
    with together(mesh):
        index = Index.from_folder(folder)
        _check_fits(folder, index, tensors)
        _check_files(reader, index, tensors)
    with together(mesh), torch.no_grad():
        for name, owned in tensors.items():
            own = owned.ownership.intervals(mesh.tp.rank)
            for piece in index.tensors[name].pieces:
                _copy_overlap(reader, name, piece, own, owned.tensor)
    return index


def _build_folder(writing: Path, final: Path) -> None:
    if final.exists():
        raise CheckpointError(f"{final}: exists already", hint="give the run another name, or delete the folder")
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{writing}: cannot be made ({error})") from error


def _save_own(writing: Path, tensors: Mapping[str, Owned], mesh: Mesh) -> int:
    if mesh.dp.rank != 0:
        return 0
    rank = mesh.tp.rank
    counted = {
        name: owned.tensor
        for name, owned in tensors.items()
        if owned.ownership.is_counted_on(rank) and owned.tensor.numel()
    }
    return save_tensors(writing / file_name(rank, mesh.tp.degree), counted)


def _build_index(
    step: int, tensors: Mapping[str, Owned], state: Mapping[str, Any], files: Mapping[str, int], mesh: Mesh
) -> Index:
    records = {
        name: TensorRecord(
            owned.ownership.shape,
            str(owned.tensor.dtype).removeprefix("torch."),
            list_pieces(owned.ownership, mesh.tp.degree),
        )
        for name, owned in tensors.items()
    }
    return Index(step, records, files, state)


def _publish(writing: Path, final: Path, index: Index) -> None:
    try:
        (writing / INDEX).write_text(index.to_json(), encoding="utf-8")
        sync(writing / INDEX)
        sync(writing)
        writing.rename(final)
        sync(final.parent)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written ({error})") from error


def _prune(directory: Path, keep: int) -> None:
    """Remove old checkpoints; each loses its name first, so that half of one is never found."""
    for step, folder in list_checkpoints(directory)[:-keep] if keep else ():
        doomed = folder.rename(directory / writing_name(step))
        shutil.rmtree(doomed, ignore_errors=True)


def _check_fits(folder: Path, index: Index, tensors: Mapping[str, Owned]) -> None:
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


def _check_files(reader: PieceReader, index: Index, tensors: Mapping[str, Owned]) -> None:
    expected: dict[str, dict[str, list[int]]] = {}
    for name in tensors:
        for piece in index.tensors[name].pieces:
            expected.setdefault(piece.file, {})[name] = [len(interval) for interval in piece.intervals]
    for file, shapes in expected.items():
        reader.check_file(file, shapes)


def _copy_overlap(reader: PieceReader, name: str, piece: Piece, own: tuple[Interval, ...], target: Tensor) -> None:
    """Copy into `target`, which holds `own`, the elements of it that are in `piece`."""
    overlap = tuple(map(Interval.intersect, own, piece.intervals))
    if not all(map(len, overlap)):
        return
    source = reader.read(piece.file, name, _relative(overlap, piece.intervals))
    target[tuple(slice(i.start, i.stop) for i in _relative(overlap, own))].copy_(source)


def _relative(intervals: tuple[Interval, ...], origin: tuple[Interval, ...]) -> tuple[Interval, ...]:
    return tuple(Interval(i.start - o.start, i.stop - o.start) for i, o in zip(intervals, origin, strict=True))
