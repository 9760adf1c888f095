"""Agreement between the ranks of a mesh: small values that all of them learn, and errors that all of them raise."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
import torch.distributed as dist

from plait.comm import collectives
from plait.comm.mesh import Axis, Mesh
from plait.errors import PlaitError, TransportError
from plait.sharding import Interval, Split, build_split

ValueT = TypeVar("ValueT")


def share(value: ValueT, mesh: Mesh) -> list[ValueT]:
    """The values of all ranks of the world, in rank order; anything small that can be pickled.

    Raises:
        TransportError: a rank did not join.
    """
    if mesh.shape.world_size == 1:
        return [value]
    size = dist.get_world_size()
    world = Axis("world", size, mesh.rank, tuple(range(size)), dist.group.WORLD, None)
    return share_over(value, world, mesh.device)


def share_over(value: ValueT, axis: Axis, device: torch.device) -> list[ValueT]:
    """As `share`, the values of all ranks of `axis`, in its order."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    lengths = collectives.all_gather(
        torch.tensor([len(own)], device=device), axis, build_split(axis.degree, axis.degree), label="share"
    )
    edges = [0, *accumulate(lengths.tolist())]
    split = Split(edges[-1], tuple(Interval(start, stop) for start, stop in pairwise(edges)))
    gathered = bytes(collectives.all_gather(own, axis, split, label="share").tolist())
    return [pickle.loads(gathered[interval.start : interval.stop]) for interval in split.intervals]


@contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """Leave the block on all ranks or on none: an error of one rank is raised by every rank.

    Every rank of the mesh has to enter. A block that may fail on some ranks only (files, disks) ends in an exchange
    of what happened, so that no rank goes on to a collective that another never reaches.
    """
    try:
        yield
    except TransportError:
        raise
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
