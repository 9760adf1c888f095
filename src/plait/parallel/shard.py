"""Cutting a whole tensor into the piece of one rank, and putting the pieces together again."""

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Mesh
from plait.errors import ShardingError
from plait.sharding import Interval, Ownership, Split


def shard_tensor(full: Tensor, ownership: Ownership, tp_rank: int) -> Tensor:
    """The part of `full` that `tp_rank` owns, as contiguous memory of its own.

    Raises:
        ShardingError: `full` does not have the global shape of the record.
    """
    if tuple(full.shape) != ownership.shape:
        raise ShardingError(f"{ownership.name}: shape {list(full.shape)} is not the global {list(ownership.shape)}")
    piece = full
    for dim, interval in enumerate(ownership.intervals(tp_rank)):
        piece = piece.narrow(dim, interval.start, len(interval))
    return piece.detach().clone(memory_format=torch.contiguous_format)


def gather_tensor(local: Tensor, ownership: Ownership, mesh: Mesh) -> Tensor:
    """The whole tensor on every tp rank, from each rank's own part; a replicated interval is taken from its first holder."""
    if ownership.dim is None or ownership.split is None or mesh.tp.degree == 1:
        return local
    split = ownership.split
    stacked = _consecutive(split)
    pieces = collectives.all_gather(local, mesh.tp, stacked, dim=ownership.dim, label=ownership.name)
    first_holders = [group[0] for group in split.replica_groups]
    return torch.cat(
        [_take(pieces, ownership.dim, stacked.intervals[rank]) for rank in first_holders], dim=ownership.dim
    )


def _consecutive(split: Split) -> Split:
    """The split of all ranks' pieces laid end to end, replicas included."""
    edges = [0]
    for length in split.lengths:
        edges.append(edges[-1] + length)
    return Split(edges[-1], tuple(map(Interval, edges[:-1], edges[1:])))


def _take(tensor: Tensor, dim: int, interval: Interval) -> Tensor:
    return tensor.narrow(dim, interval.start, len(interval))
