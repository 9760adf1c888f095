"""Column- and row-parallel linears (Shoeybi et al., arXiv:1909.08053; with sequence parallelism Korthikanti et al.,
arXiv:2205.05198).

Which collective runs at a boundary is never written here: it is the row of the transition table between the state of
the activations outside (`Shard(0)`, tokens, or `Invariant`) and the state the local GEMM needs (`Replicate` in,
`Partial` out). How it is plaited into the GEMMs is not either: `plait.parallel.region` says what a range of rows is,
and `plait.overlap` runs the schedule chosen for the pass.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm.autograd import redistribute
from plait.comm.mesh import Axis
from plait.errors import ShardingError
from plait.parallel.region import compiled
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.column import ColumnGroup, ColumnGroupFunction, Outputs
from plait.parallel.region.quantizer import PLAIN
from plait.parallel.region.row import KeepRow, RowFunction
from plait.sharding import Invariant, Replicate


class Group(Protocol):
    """What a column linear needs of the gather group it is a member of."""

    def compute(self, member: "ColumnParallelLinear", x: Tensor) -> Tensor: ...


class Columns(Protocol):
    """What a pass through columns needs of each: its own part of the parameters."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class ColumnParallelLinear(nn.Module):
    """Linear whose output features are cut over tp; alone it gathers its own input, in a group the group does.

    Attributes:
        alone: what it is without a gather group.
        group: the gather group it is a member of, if any.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, entry: Boundary, shared_over: Axis | None
    ) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.alone = ColumnGroup(entry, (shared_over,))
        self.group: Group | None = None

    def forward(self, input: Tensor) -> Tensor:
        """`[T/tp, D]`, or what the gather group has gathered, `[T, D]` -> `[T, F/tp]`. Named as in nn.Linear."""
        if self.group is not None:
            return self.group.compute(self, input)
        return run_column_group(input, self.alone, [self]).members[0]

    def multiply(self, x_full: Tensor) -> Tensor:
        """The own columns for an input that is whole and a `Replicate` already, `[T, D]` -> `[T, F/tp]`.

        Raises:
            ShardingError: the columns are quantized, and what of this input was agreed on nobody knows.
        """
        if self.alone.entry.quantizer is not PLAIN:
            raise ShardingError(
                f"{self.alone.entry.name}: is quantized, and called with {list(x_full.shape)} that is not the input of "
                "the region that was entered",
                hint="keep this linear in high precision: quantization.layers = mlp_only, or another plan",
            )
        return _multiply_whole(x_full, self.weight, self.bias, self.shared_over, self.alone.entry.name)

    @property
    def shared_over(self) -> Axis | None:
        """The axis of the ranks that hold the same KV heads, where there are fewer heads than ranks."""
        return self.alone.shared_over[0]

    def extra_repr(self) -> str:
        """Local shape and place."""
        tp = self.alone.entry.mesh.tp
        return f"{list(self.weight.shape)} of rank {tp.rank}/{tp.degree}"


class InnerColumnLinear(nn.Module):
    """Linear of an entered region whose input is whole on every rank, as a `Replicate`, and its output features cut.

    x           [T, D]          whole, any leading dims
    w_shard     [F/tp, D]       output features sharded
    y_shard     [T, F/tp]

    forward     nothing moves
    backward    nothing moves: the gradient of x is an addend, summed where the region is entered; that of a weight
                which several ranks hold is all-reduced over them
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, shared_over: Axis | None, name: str) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.shared_over = shared_over
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """Multiply. Named as in nn.Linear."""
        return _multiply_whole(input, self.weight, self.bias, self.shared_over, self.name)

    def extra_repr(self) -> str:
        """Local shape."""
        return str(list(self.weight.shape))


class RowParallelLinear(nn.Module):
    """Linear whose input features are cut over tp; `[T, F/tp]` -> `[T/tp, D]`, or `[T, D]` in all-reduce mode.

    Attributes:
        is_only_kept: whether nobody reads what it gives, so that it keeps its input for backward and does no more.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, exit: Boundary) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.exit = exit
        self.is_only_kept = False

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the own features, `[T, F/tp]`, then sum over tp. Named as in nn.Linear.

        Raises:
            ShardingError: the features are not the own ones.
        """
        x_shard, own = input, self.weight.shape[1]
        if x_shard.shape[-1] != own:
            raise ShardingError(
                f"{self.exit.name}: input {list(x_shard.shape)} does not end in the {own} features of this rank",
                hint="a row linear takes what column linears give that are cut in the same units",
            )
        if torch.compiler.is_compiling():
            return compiled.run_row(x_shard, self.weight, self.bias, self.exit)
        if self.is_only_kept:
            return KeepRow.apply(x_shard, self.weight, self.bias, self.exit)
        return RowFunction.apply(x_shard, self.weight, self.bias, self.exit, torch.is_grad_enabled())

    def extra_repr(self) -> str:
        """Local shape and place."""
        return f"{list(self.weight.shape)} of rank {self.exit.mesh.tp.rank}/{self.exit.mesh.tp.degree}"


def run_column_group(x: Tensor, group: ColumnGroup, members: Sequence[Columns], *, keeps_full: bool = False) -> Outputs:
    """Every member's output, what the group's activation makes of them, and the gathered input where it is wanted."""
    weights, biases = [member.weight for member in members], [member.bias for member in members]
    if torch.compiler.is_compiling():
        return compiled.run_column_group(x, group, weights, biases, keeps_full=keeps_full)
    x_full, activated, *outputs = ColumnGroupFunction.apply(
        x, group, keeps_full, torch.is_grad_enabled(), *weights, *biases
    )
    return Outputs(x_full, outputs, activated)


def _multiply_whole(x_full: Tensor, weight: Tensor, bias: Tensor | None, shared_over: Axis | None, name: str) -> Tensor:
    """`x_full @ w_shard.T + bias`, where parameters that several ranks hold have their gradients summed over them."""
    if shared_over is None:
        return F.linear(x_full, weight, bias)
    weight, *biases = (
        redistribute(param, shared_over, Invariant(), Replicate(), label=name)
        for param in (weight, bias)
        if param is not None
    )
    return F.linear(x_full, weight, *biases)
