"""Cutting a whole tensor into the piece of one rank, and putting the pieces together again."""

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Mesh
from plait.errors import ShardingError
from plait.sharding import Ownership


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
    """Put the whole tensor together on every tp rank; a replicated interval comes from its first holder."""
    if ownership.dim is None or ownership.split is None:
        return local
    return collectives.all_gather(local, mesh.tp, ownership.split, dim=ownership.dim, label=ownership.name)
