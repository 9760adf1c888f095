"""Saving and loading over a mesh: all ranks together, complete or not at all."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.checkpoint.index import Index
from plait.checkpoint.names import INDEX, WRITING, file_name, folder_name, list_checkpoints, writing_name
from plait.checkpoint.part import Tensors, build_index, check_part, load_part, save_part
from plait.checkpoint.safetensors import sync
from plait.comm.agree import share, together
from plait.comm.mesh import Mesh
from plait.errors import CheckpointError


def save_checkpoint(
    directory: Path, step: int, tensors: Tensors, state: Mapping[str, Any], mesh: Mesh, *, keep: int = 0
) -> Path:
    """Save a checkpoint, on every rank of the mesh, and return its folder.

    Every rank that has something to write writes a file; every element is written once, at its true size. All of it
    goes to a folder beside that gets its name when it is complete, so that whatever fails, the checkpoints before it
    stay as they are. Then only the newest `keep` are kept (0: all).

    Raises:
        CheckpointError: on every rank, if any of them could not write.
    """
    writing, final = directory / writing_name(step), directory / folder_name(step)
    try:
        with together(mesh):
            if mesh.rank == 0:
                _build_folder(writing, final)
        with together(mesh):
            part = save_part(writing, tensors, file_name(mesh.rank, mesh.shape.world_size))
        parts = share(part, mesh)
        with together(mesh):
            if mesh.rank == 0:
                _publish(writing, final, build_index(step, state, parts))
                _prune(directory, keep)
    except BaseException:
        if mesh.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise
    return final


def load_checkpoint(folder: Path, tensors: Tensors, mesh: Mesh) -> Index:
    """Fill this rank's `tensors` from a checkpoint, on every rank of the mesh, and return its index.

    The checkpoint may have been written at any tp degree. Names are taken by their first part: asking for `model/...`
    alone leaves the optimizer unread. Nothing is overwritten before all ranks have found everything they need.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or is not of this model.
    """
    with together(mesh):
        index = Index.from_folder(folder)
        check_part(folder, index, tensors)
    with together(mesh):
        load_part(folder, index, tensors)
    return index


def _build_folder(writing: Path, final: Path) -> None:
    if final.exists():
        raise CheckpointError(f"{final}: exists already", hint="give the run another name, or delete the folder")
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{writing}: cannot be made ({error.strerror})", hint="set out_dir and name") from error


def _publish(writing: Path, final: Path, index: Index) -> None:
    try:
        (writing / INDEX).write_text(index.to_json(), encoding="utf-8")
        sync(writing / INDEX)
        sync(writing)
        writing.rename(final)
        sync(final.parent)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written ({error.strerror})") from error


def _prune(directory: Path, keep: int) -> None:
    """Remove old checkpoints, and what failed saves left. Each loses its name first: half of one is never found."""
    for step, folder in list_checkpoints(directory)[:-keep] if keep else ():
        folder.rename(directory / writing_name(step))
    for leftover in directory.glob(f"{WRITING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
