"""What FSDP moves, issued and recorded as every collective of plait is."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# What `set_custom_all_gather` and `set_custom_reduce_scatter`, which are public, take; torch exports it nowhere else.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from plait.comm import collectives
from plait.comm.mesh import Axis
from plait.sharding import build_split

GATHERED = "parameters"
SUMMED = "gradients"
"""What the collectives are called in a trace."""


class _Allocating:
    """Plain memory for what is sent and received."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer; FSDP decides for how long."""
        return torch.empty(tuple(map(int, size)), dtype=dtype, device=device)


class GatherParameters(_Allocating, AllGather):
    """The parameters of a unit, all in one buffer: every rank's shards, one rank after the other."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather into `output_tensor`; on the GPU the stream that FSDP has chosen waits, not the host."""
        collectives.all_gather_into(output_tensor, input_tensor, self.axis, label=GATHERED)


class ScatterGradients(_Allocating, ReduceScatter):
    """The gradients of a unit: sums, never means, carried in the dtype of the axis."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum into `output_tensor`, which is in the format of the masters whatever carries the sum."""
        split = build_split(input_tensor.numel(), self.axis.degree)
        output_tensor.copy_(collectives.reduce_scatter(input_tensor, self.axis, split, label=SUMMED))


class SumOverReplicas:
    """What follows where ranks hold the same shards: the sum of their gradients."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, shards: Tensor) -> None:
        """Sum in place."""
        shards.copy_(collectives.all_reduce(shards, self.axis, label=SUMMED))
