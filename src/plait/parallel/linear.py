"""Column- and row-parallel linears (Shoeybi et al., arXiv:1909.08053; with sequence parallelism Korthikanti et al.,
arXiv:2205.05198).

Which collective runs at a boundary is never written here: it is the row of the transition table between the state of
the activations outside (`Shard(0)`, tokens, or `Invariant`) and the state the local GEMM needs (`Replicate` in,
`Partial` out).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

        grad_x = None
        if needs_x:
            grad_x = ctx.entry.backward(_sum_dgrads(grad_x_full, grad_outputs, weights, x), ctx.split)

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
    grad_x_full: Tensor | None, grad_outputs: Sequence[Tensor | None], weights: Sequence[Tensor], like: Tensor
) -> Tensor:
    total = grad_x_full
    for grad_y, weight in zip(grad_outputs, weights, strict=True):
        if grad_y is not None:
            dgrad = grad_y @ weight
            # Not in place where total came from autograd: that buffer may be someone else's gradient too.
            total = dgrad if total is None else total.add_(dgrad) if total is not grad_x_full else total + dgrad
    return like.new_zeros(like.shape) if total is None else total


def _wgrad(grad_y: Tensor, x: Tensor) -> Tensor:
    return grad_y.flatten(0, -2).T @ x.flatten(0, -2)


def _sum_shared(grad: Tensor | None, axis: Axis | None, label: str) -> Tensor | None:
    if grad is None or axis is None:
        return grad
    return collectives.apply(_SHARED.backward, grad, axis, split=None, label=label)


class ColumnParallelLinear(nn.Module):
    """Linear whose output features are cut over tp.

    Alone it gathers its own input. As a member of a gather group it is handed its output by the group; in a group that
    runs when the parent is entered, it computes it from the whole input it is called with where that is another tensor.

    Attributes:
        shared_over: the axis of the ranks that hold the same KV heads, where there are fewer heads than ranks.
        group: what it is a member of, if anything.
        ready: an input of the group and this member's output for it.
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
        self.group: GatherGroup | FirstUseGroup | None = None
        self.ready: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`[T/tp, D]`, or the gathered `[T, D]` where the parent has entered the group -> `[T, F/tp]`."""
        if self.group is None:
            return run_column_group(x, self.entry, [self])[1]
        if isinstance(self.group, FirstUseGroup):
            return self.group.take(self, x)
        if self.ready is not None and self.ready[0] is x:
            return self.ready[1]
        return F.linear(x, self._shared(self.weight), None if self.bias is None else self._shared(self.bias))

    def _shared(self, param: Tensor) -> Tensor:
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

    def forward(self, x_shard: Tensor) -> Tensor:
        """Multiply the own features, then sum over tp."""
        return RowFunction.apply(x_shard, self.weight, self.bias, self.exit)

    def extra_repr(self) -> str:
        """Local shape and place."""
        return f"{list(self.weight.shape)} of rank {self.exit.mesh.tp.rank}/{self.exit.mesh.tp.degree}"


def run_column_group(x: Tensor, entry: Boundary, members: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The gathered input and every member's output."""
    params = [member.weight for member in members] + [member.bias for member in members]
    return ColumnGroupFunction.apply(x, entry, tuple(member.shared_over for member in members), *params)


class FirstUseGroup:
    """Members that read the same input, run together when the first of them is called with it.

    What the parent does with its input otherwise (a norm in front, a residual sum behind) stays outside the region.
    """

    def __init__(self, members: Sequence[ColumnParallelLinear], entry: Boundary) -> None:
        self.members = tuple(members)
        self.entry = entry
        for member in members:
            member.group = self

    def take(self, member: ColumnParallelLinear, x: Tensor) -> Tensor:
        """The output of `member` for `x`, once: it is held no longer than until then."""
        if member.ready is None or member.ready[0] is not x:
            _, *outputs = run_column_group(x, self.entry, self.members)
            for each, output in zip(self.members, outputs, strict=True):
                each.ready = (x, output)
        assert member.ready is not None
        output, member.ready = member.ready[1], None
        return output


class GatherGroup:
    """Members under one parent module that read the same input, run together when the parent is entered.

    The parent's first tensor argument is gathered once; the members' outputs come with it, and the parent's forward
    sees the gathered tensor. So a forward that reads its input's shape before projecting works unchanged. Whatever else
    it does with its input must end in a row linear, or the gradient of that use would be summed tp times: `apply` uses
    `FirstUseGroup` where the parent holds anything else, and in all-reduce mode, where the input is whole anyway.
    """

    def __init__(self, parent: nn.Module, members: Sequence[ColumnParallelLinear], entry: Boundary) -> None:
        self.members = tuple(members)
        self.entry = entry
        for member in members:
            member.group = self
        parent.register_forward_pre_hook(self._enter, with_kwargs=True)
        parent.register_forward_hook(self._leave, always_call=True)

    def _enter(
        self, parent: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place: int | str = next(
            (i for i, value in enumerate(args) if isinstance(value, Tensor)),
            next((name for name, value in kwargs.items() if isinstance(value, Tensor)), -1),
        )
        if place == -1:
            raise ShardingError(
                f"{self.entry.name}: {type(parent).__name__} was called without a tensor to gather",
                hint="pass the activation as an argument of the module whose linears form the gather group",
            )
        x = args[place] if isinstance(place, int) else kwargs[place]
        x_full, *outputs = run_column_group(x, self.entry, self.members)
        for member, output in zip(self.members, outputs, strict=True):
            member.ready = (x_full, output)
        if isinstance(place, int):
            return (*args[:place], x_full, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: x_full}

    def _leave(self, parent: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for member in self.members:
            member.ready = None
