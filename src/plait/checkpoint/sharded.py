"""Saving and loading over a mesh: all ranks together, complete or not at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.checkpoint.index import Index
from plait.checkpoint.part import Tensors
from plait.checkpoint.read import Checkpoint, check_fits
from plait.checkpoint.save import Save
from plait.comm.agree import share_over, together
from plait.comm.mesh import Mesh


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
    save = Save(directory, step, state, keep)
    try:
        with together(mesh):
            if mesh.rank == 0:
                save.begin()
        with together(mesh):
            save.write(tensors, mesh.rank)
        with together(mesh):
            if mesh.rank == 0:
                save.publish(mesh.shape.world_size)
    except BaseException:
        if mesh.rank == 0:
            save.discard()
        raise
    return save.final


def load_checkpoint(folder: Path, tensors: Tensors, mesh: Mesh) -> Index:
    """Fill this rank's `tensors` from a checkpoint, on every rank of the mesh, and return its index.

    The checkpoint may have been written on any mesh. Names are taken by their first part: asking for `model....` alone
    leaves the optimizer unread. Nothing is overwritten before all ranks have found everything they need, and all files
    together have been found to hold what was written.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or is not of this model.
    """
    shapes = _share_shapes(tensors, mesh)
    checkpoint = check_checkpoint(folder, mesh)
    with together(mesh):
        check_fits(checkpoint, shapes)
    with together(mesh):
        checkpoint.read_into(tensors)
    return checkpoint.index


def check_checkpoint(folder: Path, mesh: Mesh) -> Checkpoint:
    """Open a checkpoint on every rank, and read all of its files, each on one rank, to check their sums.

    Raises:
        CheckpointError: on every rank, if it is damaged, partial or foreign.
    """
    with together(mesh):
        checkpoint = Checkpoint.from_folder(folder)
    with together(mesh):
        checkpoint.index.check_files(folder, sorted(checkpoint.index.files)[mesh.rank :: mesh.shape.world_size])
    return checkpoint


def _share_shapes(tensors: Tensors, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """Of the tensors of all stages of the pipeline."""
    own = {name: owned.shape for name, owned in tensors.items()}
    if mesh.pp.degree == 1:
        return own
    return {name: shape for shapes in share_over(own, mesh.pp, mesh.device) for name, shape in shapes.items()}
