"""Column- and row-parallel linears (Shoeybi et al., arXiv:1909.08053; with sequence parallelism Korthikanti et al.,
arXiv:2205.05198).

Which collective runs at a boundary is never written here: it is the row of the transition table between the state of
the activations outside (`Shard(0)`, tokens, or `Invariant`) and the state the local GEMM needs (`Replicate` in,
`Partial` out).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import collectives
from plait.comm.autograd import redistribute
from plait.comm.mesh import Axis, Mesh
from plait.errors import ShardingError
from plait.parallel.tokens import current_tokens
from plait.sharding import Invariant, Partial, Placement, Replicate, Shard, Split, Transition, derive_transition

_SHARED = derive_transition(Invariant(), Replicate())
"""A parameter held alike by several ranks that use it on different heads: its gradients are addends."""


@dataclass(frozen=True)
class Boundary:
    """Where activations enter or leave a parallel region: the mesh, the transition there, and its name in traces."""

    mesh: Mesh
    transition: Transition
    name: str

    @classmethod
    def build_entry(cls, mesh: Mesh, outside: Placement, name: str) -> "Boundary":
        """The boundary in front of column linears."""
        return cls(mesh, derive_transition(outside, Replicate()), name)

    @classmethod
    def build_exit(cls, mesh: Mesh, outside: Placement, name: str) -> "Boundary":
        """The boundary behind a row linear."""
        return cls(mesh, derive_transition(Partial(), outside), name)

    def current_split(self) -> Split | None:
        """How tokens are cut in the forward pass under way; None where every rank has all of them."""
        outside_is_sharded = isinstance(self.transition.source, Shard) or isinstance(self.transition.target, Shard)
        return current_tokens(self.mesh, self.name) if outside_is_sharded else None

    def forward(self, x: Tensor, split: Split | None) -> Tensor:
        """Move an activation over the boundary."""
        return collectives.apply(self.transition.forward, x, self.mesh.tp, split=split, label=self.name)

    def backward(self, grad: Tensor, split: Split | None) -> Tensor:
        """Move a gradient over the boundary, the other way."""
        return collectives.apply(self.transition.backward, grad, self.mesh.tp, split=split, label=self.name)


class ColumnGroupFunction(torch.autograd.Function):
    """Column-parallel linears that read one input: one gather forward, one reduction backward for all of them.

        x_shard     [T/tp, D]       tokens sharded (or whole, in all-reduce mode)
        w_shard     [F/tp, D]       output features sharded, one per member
        x_full      [T, D]          the gathered input, for a module that reads it otherwise
        y_shard     [T, F/tp]       one per member

        forward     x_full = all_gather(x_shard); y_shard = x_full @ w_shard.T
        dgrad       grad_x_shard = reduce_scatter(grad_x_full + sum of grad_y_shard @ w_shard)
        wgrad       grad_w_shard = grad_y_shard.T @ all_gather(x_shard)     gathered again: only the shard is kept

    A KV weight held by several ranks has its gradient summed over them here.

    Contract: `contract.linear.derive_column_group`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, entry: Boundary, shared_over: Sequence[Axis | None], *params: Any
    ) -> tuple[Tensor, ...]:
        members = len(shared_over)
        weights, biases = params[:members], params[members:]
        ctx.entry, ctx.shared_over, ctx.split = entry, shared_over, entry.current_split()
        ctx.set_materialize_grads(False)
        x_full = entry.forward(x, ctx.split)
        ctx.save_for_backward(x, *weights)
        outputs = [F.linear(x_full, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return (x_full, *outputs)

    @staticmethod
    def backward(ctx: Any, grad_x_full: Tensor | None, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs_params = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        needs_weight = needs_params[: len(weights)]
        x_full = ctx.entry.forward(x, ctx.split) if any(needs_weight) else None

        grad_x = _sum_dgrads(grad_x_full, grad_outputs, weights) if needs_x else None
        if grad_x is not None:
            grad_x = ctx.entry.backward(grad_x, ctx.split)

        grad_weights: list[Tensor | None] = []
        grad_biases: list[Tensor | None] = []
        for index, (grad_y, axis) in enumerate(zip(grad_outputs, ctx.shared_over, strict=True)):
            wants_weight, wants_bias = needs_weight[index], needs_params[len(weights) + index]
            wgrad = _wgrad(grad_y, x_full) if wants_weight and grad_y is not None and x_full is not None else None
            grad_weights.append(_sum_shared(wgrad, axis, ctx.entry.name))
            bgrad = grad_y.flatten(0, -2).sum(0) if wants_bias and grad_y is not None else None
            grad_biases.append(_sum_shared(bgrad, axis, ctx.entry.name))
        return (grad_x, None, None, *grad_weights, *grad_biases)


class RowFunction(torch.autograd.Function):
    """Row-parallel linear; the bias is added once, after the reduction.

        x_shard     [T, F/tp]       features sharded
        w_shard     [D, F/tp]       input features sharded
        bias        [D]             whole on every rank
        y_shard     [T/tp, D]       tokens sharded (or whole, in all-reduce mode)

        forward     y_shard = reduce_scatter(x_shard @ w_shard.T) + bias
        dgrad       grad_x_shard = all_gather(grad_y_shard) @ w_shard
        wgrad       grad_w_shard = all_gather(grad_y_shard).T @ x_shard     the same gather
        bias        grad_bias = sum over tokens of all_gather(grad_y_shard) the same gather, so nothing else moves

    Contract: `contract.linear.derive_row`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exit: Boundary) -> Tensor:
        ctx.exit, ctx.split = exit, exit.current_split()
        ctx.save_for_backward(x, weight)
        y = exit.forward(F.linear(x, weight), ctx.split)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_y_full = ctx.exit.backward(grad_y, ctx.split)
        return (
            grad_y_full @ weight if needs_x else None,
            _wgrad(grad_y_full, x) if needs_weight else None,
            grad_y_full.flatten(0, -2).sum(0) if needs_bias else None,
            None,
        )


def _sum_dgrads(
    grad_x_full: Tensor | None, grad_outputs: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> Tensor | None:
    total = grad_x_full
    for grad_y, weight in zip(grad_outputs, weights, strict=True):
        if grad_y is not None:
            dgrad = grad_y @ weight
            # Not in place where total came from autograd: that buffer may be someone else's gradient too.
            total = dgrad if total is None else total.add_(dgrad) if total is not grad_x_full else total + dgrad
    return total


def _wgrad(grad_y: Tensor, x: Tensor) -> Tensor:
    return grad_y.flatten(0, -2).T @ x.flatten(0, -2)


def _sum_shared(grad: Tensor | None, axis: Axis | None, label: str) -> Tensor | None:
    if grad is None or axis is None:
        return grad
    return collectives.apply(_SHARED.backward, grad, axis, split=None, label=label)


class Group(Protocol):
    """What a column linear needs of the gather group it is a member of."""

    def compute(self, member: "ColumnParallelLinear", x: Tensor) -> Tensor: ...


class ColumnParallelLinear(nn.Module):
    """Linear whose output features are cut over tp; alone it gathers its own input, in a group the group does.

    Attributes:
        shared_over: the axis of the ranks that hold the same KV heads, where there are fewer heads than ranks.
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
        self.entry = entry
        self.shared_over = shared_over
        self.group: Group | None = None

    def forward(self, input: Tensor) -> Tensor:
        """`[T/tp, D]`, or what the gather group has gathered, `[T, D]` -> `[T, F/tp]`. Named as in nn.Linear."""
        return run_column_group(input, self.entry, [self])[1] if self.group is None else self.group.compute(self, input)

    def multiply(self, x_full: Tensor) -> Tensor:
        """The own columns for an input that is whole and a `Replicate` already, `[T, D]` -> `[T, F/tp]`."""
        return F.linear(x_full, self._use(self.weight), None if self.bias is None else self._use(self.bias))

    def _use(self, param: Tensor) -> Tensor:
        if self.shared_over is None:
            return param
        return redistribute(param, self.shared_over, Invariant(), Replicate(), label=self.entry.name)

    def extra_repr(self) -> str:
        """Local shape and place."""
        return f"{list(self.weight.shape)} of rank {self.entry.mesh.tp.rank}/{self.entry.mesh.tp.degree}"


class RowParallelLinear(nn.Module):
    """Linear whose input features are cut over tp; `[T, F/tp]` -> `[T/tp, D]`, or `[T, D]` in all-reduce mode."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, exit: Boundary) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.exit = exit

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
        return RowFunction.apply(x_shard, self.weight, self.bias, self.exit)

    def extra_repr(self) -> str:
        """Local shape and place."""
        return f"{list(self.weight.shape)} of rank {self.exit.mesh.tp.rank}/{self.exit.mesh.tp.degree}"


def run_column_group(x: Tensor, entry: Boundary, members: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The gathered input and every member's output."""
    params = [member.weight for member in members] + [member.bias for member in members]
    return ColumnGroupFunction.apply(x, entry, tuple(member.shared_over for member in members), *params)
