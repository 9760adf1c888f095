"""Column- and row-parallel linears (Shoeybi et al., arXiv:1909.08053; with sequence parallelism Korthikanti et al.,
arXiv:2205.05198).

Which collective runs at a boundary is never written here: it is the row of the transition table between the state of
the activations outside (`Shard(0)`, tokens, or `Invariant`) and the state the local GEMM needs (`Replicate` in,
`Partial` out). How it is plaited into the GEMMs is not either: the functions say what a range of rows is, and
`plait.overlap` runs the schedule chosen for the pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import collectives
from plait.comm.autograd import redistribute
from plait.comm.mesh import Axis, Mesh
from plait.errors import ShardingError
from plait.overlap.collective_matmul import CollectiveMatmul, Pass
from plait.overlap.execute import Addends, Outcome, Rows
from plait.overlap.site import Site
from plait.parallel.gemm import ColumnDgrad, ColumnForward, ColumnWgrad, RowDgrad, RowForward, RowWgrad
from plait.parallel.tokens import current_tokens
from plait.schedule.work import Operation
from plait.sharding import Invariant, Partial, Placement, Replicate, Shard, Transition, derive_transition

_SHARED = derive_transition(Invariant(), Replicate())
"""A parameter held alike by several ranks that use it on different heads: its gradients are addends."""


@dataclass(frozen=True)
class Boundary:
    """Where activations enter or leave a parallel region: the transition there, and what runs it."""

    mesh: Mesh
    transition: Transition
    site: Site
    matmul: CollectiveMatmul

    @classmethod
    def build_entry(cls, mesh: Mesh, outside: Placement, site: Site, matmul: CollectiveMatmul) -> "Boundary":
        """The boundary in front of column linears."""
        return cls(mesh, derive_transition(outside, Replicate()), site, matmul)

    @classmethod
    def build_exit(cls, mesh: Mesh, outside: Placement, site: Site, matmul: CollectiveMatmul) -> "Boundary":
        """The boundary behind a row linear."""
        return cls(mesh, derive_transition(Partial(), outside), site, matmul)

    @property
    def name(self) -> str:
        """Its name in traces."""
        return self.site.label

    @property
    def is_sharded(self) -> bool:
        """Whether the tokens outside are sharded."""
        return isinstance(self.transition.source, Shard) or isinstance(self.transition.target, Shard)

    def count_rows(self, x: Tensor, *, is_inside: bool) -> int:
        """T: the tokens of the forward pass under way, of which `x` has all inside and the own ones outside.

        Raises:
            ShardingError: `x` has another number of tokens.
        """
        if not self.is_sharded:
            return x.shape[:-1].numel()
        split = current_tokens(self.mesh, self.name)
        rows = split.size if is_inside else split.lengths[self.mesh.tp.rank]
        if x.dim() != 2 or x.shape[0] != rows:
            raise ShardingError(
                f"{self.name}: rank {self.mesh.tp.rank} on 'tp' of degree {self.mesh.tp.degree} has {list(x.shape)}, "
                f"but dim 0 should have {rows} of {split.size} elements, cut as {', '.join(map(str, split.intervals))}",
                hint="tokens are flattened, [T, D], while they are sharded",
            )
        return split.size

    def run(
        self,
        operation: Operation,
        num_rows: int,
        gemms: Mapping[str, Rows],
        *,
        needs: tuple[bool, bool] = (True, True),
        shard: Tensor | None = None,
        addends: Addends | None = None,
    ) -> Outcome:
        """Run a pass of the linears here; `needs` says whether a backward is to compute dgrad and wgrad."""
        what = Pass(operation, self.site, self.transition, num_rows, *needs)
        return self.matmul.run(what, gemms=gemms, shard=shard, addends=addends)


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
        ctx: Any, x: Tensor, entry: Boundary, shared_over: Sequence[Axis | None], keeps_full: bool, *params: Any
    ) -> tuple[Tensor | None, ...]:
        members = len(shared_over)
        weights, biases = params[:members], params[members:]
        ctx.entry, ctx.shared_over, ctx.num_rows = entry, shared_over, entry.count_rows(x, is_inside=False)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        shape = x.shape[:-1] if x.dim() > 2 else (ctx.num_rows,)
        outputs = [x.new_empty(*shape, weight.shape[0]) for weight in weights]
        gemm = ColumnForward(x.flatten(0, -2), weights, biases, [output.flatten(0, -2) for output in outputs])
        outcome = entry.run(Operation.COLUMN_FORWARD, ctx.num_rows, {"forward": gemm}, shard=gemm.x)
        return (outcome.keep_full() if keeps_full else None, *outputs)

    @staticmethod
    def backward(ctx: Any, grad_x_full: Tensor | None, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs_params = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        needs_weight, needs_bias = needs_params[: len(weights)], needs_params[len(weights) :]
        grads = [None if grad is None else grad.flatten(0, -2) for grad in grad_outputs]
        rows_x = x.flatten(0, -2)
        wgrad = ColumnWgrad.build(rows_x, grads, weights, needs_weight)
        outcome = ctx.entry.run(
            Operation.COLUMN_BACKWARD,
            ctx.num_rows,
            {"dgrad": ColumnDgrad(grads, weights, grad_x_full), "wgrad": wgrad},
            shard=rows_x,
            addends=Addends(x.shape[-1], x.dtype, x.device),
            needs=(needs_x, any(needs_weight)),
        )
        grad_x = None if outcome.total is None else outcome.total.view(x.shape)
        grad_biases = [
            grad.sum(0) if needs and grad is not None else None for grad, needs in zip(grads, needs_bias, strict=True)
        ]
        grad_params = [
            [_sum_shared(grad, axis, ctx.entry.name) for grad in pair]
            for *pair, axis in zip(wgrad.grad_weights, grad_biases, ctx.shared_over, strict=True)
        ]
        return (grad_x, None, None, None, *(pair[0] for pair in grad_params), *(pair[1] for pair in grad_params))


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
        ctx.exit, ctx.num_rows = exit, exit.count_rows(x, is_inside=True)
        ctx.save_for_backward(x, weight)
        width = weight.shape[0]
        outcome = exit.run(
            Operation.ROW_FORWARD,
            ctx.num_rows,
            {"forward": RowForward(x.flatten(0, -2), weight)},
            addends=Addends(width, x.dtype, x.device),
        )
        assert outcome.total is not None, exit.name
        y = outcome.total if bias is None else outcome.total.add_(bias)
        return y.view(*x.shape[:-1], width) if x.dim() > 2 else y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows_x, rows_grad = x.flatten(0, -2), grad_y.flatten(0, -2)
        dgrad = RowDgrad(rows_grad, weight, torch.empty_like(rows_x) if needs_x else None)
        wgrad = RowWgrad(rows_grad, rows_x, torch.empty_like(weight) if needs_weight else None)
        outcome = ctx.exit.run(
            Operation.ROW_BACKWARD,
            ctx.num_rows,
            {"dgrad": dgrad, "wgrad": wgrad},
            shard=rows_grad,
            needs=(needs_x, needs_weight),
        )
        grad_bias = (rows_grad if outcome.full is None else outcome.full).sum(0) if needs_bias else None
        return None if dgrad.grad_x is None else dgrad.grad_x.view(x.shape), wgrad.grad_weight, grad_bias, None


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
        if self.group is not None:
            return self.group.compute(self, input)
        return run_column_group(input, self.entry, [self])[1][0]

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


def run_column_group(
    x: Tensor, entry: Boundary, members: Sequence[ColumnParallelLinear], *, keeps_full: bool = False
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """The gathered input, where it is wanted, and every member's output."""
    params = [member.weight for member in members] + [member.bias for member in members]
    shared_over = tuple(member.shared_over for member in members)
    x_full, *outputs = ColumnGroupFunction.apply(x, entry, shared_over, keeps_full, *params)
    return x_full, tuple(outputs)
