"""Agreement between the ranks of a mesh: small values that all of them learn, and errors that all of them raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from plait.comm import trace
from plait.comm.mesh import Mesh
from plait.errors import PlaitError, TransportError, TransportTimeout

ValueT = TypeVar("ValueT")


def share(value: ValueT, mesh: Mesh) -> list[ValueT]:
    """The values of all ranks, in rank order; anything that can be pickled.

    Raises:
        TransportError: a rank did not join.
    """
    if mesh.shape.world_size == 1:
        return [value]
    gathered: list[ValueT] = [value] * mesh.shape.world_size
    try:
        dist.all_gather_object(gathered, value)
    except RuntimeError as error:
        kind = TransportTimeout if "timed out" in str(error).lower() else TransportError
        raise kind(f"{trace.identity()}: waiting for every rank to report failed: {error}") from error
    return gathered


@contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """Leave the block on all ranks or on none: an error of one rank is raised by every rank.

    Every rank of the mesh has to enter. A block that may fail on some ranks only (files, disks) ends in an exchange of what
    happened, so that no rank goes on to a collective that another never reaches.
    """
    try:
        yield
    except PlaitError as error:
        _raise_first(share(error, mesh))
    except Exception as error:
        share(TransportError(f"{type(error).__name__}: {error}"), mesh)
        raise
    else:
        _raise_first(share(None, mesh))


def _raise_first(errors: list[PlaitError | None]) -> None:
    """Raise what the ranks report: as it is where they agree, with the ranks named where only some failed."""
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if not failed:
        return
    first = next(iter(failed.values()))
    if len(failed) == len(errors) and len({error.message for error in failed.values()}) == 1:
        raise first
    listed = "\n".join(f"rank {rank}: {error.message}" for rank, error in failed.items())
    raise type(first)(listed, hint=first.hint)
