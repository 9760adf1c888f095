"""The same local work with nothing moved: an axis whose collectives return at once, with whatever is in memory."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from plait.comm.mesh import Mesh
from plait.comm.shared.memory import SharedMemory
from plait.sharding import Split

_Cut = tuple[int, Split]


def build_lone_mesh(mesh: Mesh) -> Mesh:
    """`mesh` as if every collective over tp took no time; what they give is wrong, of the right shape."""
    lone = cast(SharedMemory, _NothingMoves(mesh.tp.rank))
    return replace(mesh, axes={**mesh.axes, "tp": replace(mesh.tp, group=None, shared=lone)})


class _NothingMoves:
    """Stands where memory that is shared would, and does not even read it."""

    def __init__(self, rank: int) -> None:
        self.collectives = self
        self.rank = rank
        self.gather = self.reduce = None
        """Channels of overlapped passes, of which there are none."""

    def all_reduce(self, x: Tensor, op: str, carrier: torch.dtype, label: str) -> Tensor:
        return x.to(carrier)

    def all_gather(self, x_shard: Tensor, split: Split, dim: int, label: str) -> Tensor:
        # The own rows are put into place, as every gather does; the others would come from elsewhere.
        x_full = _fresh(x_shard, dim, split.size)
        own = split.intervals[self.rank]
        x_full.narrow(dim, own.start, len(own)).copy_(x_shard)
        return x_full

    def reduce_scatter(self, x_partial: Tensor, split: Split, dim: int, carrier: torch.dtype, label: str) -> Tensor:
        own = split.intervals[self.rank]
        return x_partial.narrow(dim, own.start, len(own)).to(carrier, copy=True)

    def all_to_all(self, x_shard: Tensor, gather: _Cut, scatter: _Cut, label: str) -> Tensor:
        (gather_dim, gather_split), (scatter_dim, scatter_split) = gather, scatter
        own = scatter_split.intervals[self.rank]
        return _fresh(x_shard.narrow(scatter_dim, own.start, len(own)), gather_dim, gather_split.size)


def _fresh(like: Tensor, dim: int, length: int) -> Tensor:
    shape: list[Any] = list(like.shape)
    shape[dim] = length
    # Codes of whatever is in memory may stand for no number, which quantizers behind them refuse.
    return like.new_zeros(shape) if like.dtype == torch.uint8 else like.new_empty(shape)
