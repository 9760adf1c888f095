"""The pass through column-parallel linears that read one input, forward and backward, and as autograd sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.autograd.once import once_differentiable
from plait.comm.handle import Handled
from plait.comm.mesh import Axis
from plait.overlap.ahead import Next
from plait.overlap.execute import Addends
from plait.parallel.region.activation import ActivationGradient, PointwiseActivation
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.gemm import ColumnDgrad, ColumnForward, ColumnWgrad
from plait.parallel.region.half import is_split, select_half
from plait.parallel.region.matrix import flatten, keep_full, payload_of, sum_rows, unflatten
from plait.parallel.region.quantizer import Kept, Needs
from plait.schedule.work import Operation
from plait.sharding import Interval, Invariant, Replicate, derive_transition

_FIRST_PARAMETER = 4
"""Among the arguments of `ColumnGroupFunction`: weights from there on, and behind them biases."""

_SHARED = derive_transition(Invariant(), Replicate())
"""A parameter held alike by several ranks that use it on different heads: its gradients are addends."""


@dataclass(frozen=True)
class ColumnGroup(Handled):
    """Column linears that read one input.

    Attributes:
        shared_over: of each member, the axis of the ranks that hold the same KV heads, if any.
        activation: what reads all outputs, applied to rows as soon as they are there.
    """

    entry: Boundary
    shared_over: tuple[Axis | None, ...]
    activation: PointwiseActivation | None = None


class Operands(NamedTuple):
    """What a pass forward through a group reads: the input, `[T/tp, D]` (or whole), and each member's parameters."""

    x: Tensor
    num_rows: int
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]


class Outputs(NamedTuple):
    """What a group gives.

    Attributes:
        x_full: the gathered input, where it is wanted.
        members: each `[T, F/tp]`.
        activated: the activation of these, if there is one.
    """

    x_full: Tensor | None
    members: Sequence[Tensor]
    activated: Tensor | None


class OutputGradients(NamedTuple):
    """What came back for each of `Outputs`; None where nothing did."""

    x_full: Tensor | None
    members: Sequence[Tensor | None]
    activated: Tensor | None


class Gradients(NamedTuple):
    """Those that are wanted and exist."""

    x: Tensor | None
    weights: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]


def run_forward(
    group: ColumnGroup, operands: Operands, needs: Needs, *, keeps_full: bool
) -> tuple[Outputs, Tensor | None, Kept]:
    """Gather the input, multiply it, and activate the products; what of the input wgrad reads is to be kept."""
    x, num_rows, activation = operands.x, operands.num_rows, group.activation
    group.entry.check_dtype(x, *operands.weights, *operands.biases)
    shape = x.shape[:-1] if x.dim() > 2 else (num_rows,)
    outputs = [x.new_empty(*shape, weight.shape[0]) for weight in operands.weights]
    activated = None if activation is None else torch.empty_like(outputs[0])
    reading = group.entry.quantizer.read(x, num_rows, operands.weights, needs)
    gemm = ColumnForward(
        reading.x,
        reading.weights,
        operands.biases,
        [flatten(output) for output in outputs],
        activation,
        None if activated is None else flatten(activated),
    )
    what = group.entry.build_pass(Operation.COLUMN_FORWARD, num_rows, x.dtype)
    outcome = group.entry.matmul.run(what, gemms={"forward": gemm}, shard=payload_of(gemm.x))
    full = None
    if keeps_full:
        # In all-reduce mode what is outside is what is inside, unless that is quantized.
        read = keep_full(gemm.x, outcome, x.dtype)
        full = x if read is None else read if group.entry.is_sharded else unflatten(read, x.shape)
    return Outputs(full, outputs, activated), reading.kept, Kept(reading.memory, x.shape, num_rows)


def run_backward(
    group: ColumnGroup,
    kept_x: Tensor | None,
    kept: Kept,
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
    grads: OutputGradients,
    needs: Needs,
    this: Next | None = None,
) -> Gradients:
    """Reduce dgrad while the input is gathered again for wgrad; `outputs` are given where an activation reads them."""
    num_rows, like = kept.num_rows, weights[0]
    x, factors = group.entry.quantizer.read_again(kept_x, kept.memory, weights, needs)
    activation = _build_activation_gradient(group, outputs, grads)
    members: Sequence[Tensor | None] = _flatten(grads.members) if activation is None else activation.grads
    reading = group.entry.quantizer.read_gradients(members, kept.memory, needs, activation)
    # All of dgrad goes before any of wgrad in every schedule: an input that wants none leaves the rows to wgrad.
    grad_x_full = None if grads.x_full is None else flatten(grads.x_full)
    dgrad = ColumnDgrad(reading.dgrad, factors, grad_x_full, reading.activation)
    filled = None if needs.x else reading.activation
    wgrad = ColumnWgrad(x, reading.wgrad, weights, needs.weights, filled, [None] * len(weights))
    outcome = group.entry.matmul.run(
        group.entry.build_pass(Operation.COLUMN_BACKWARD, num_rows, like.dtype, (needs.x, any(needs.weights))),
        gemms={"dgrad": dgrad, "wgrad": wgrad},
        shard=payload_of(x),
        addends=Addends(like.shape[1], like.dtype, like.device),
        this=this,
    )
    if reading.activation is not None and not needs.x and not any(needs.weights):
        reading.activation.fill(Interval(0, num_rows))
    grad_weights: list[Tensor | None] = []
    grad_biases: list[Tensor | None] = []
    for member, axis in enumerate(group.shared_over):
        read_bias = reading.biases[member] if needs.biases[member] else None
        grad_bias = None if read_bias is None else sum_rows(read_bias, None, like.dtype)
        grad_weights.append(_sum_shared(wgrad.grad_weights[member], axis, group.entry.name))
        grad_biases.append(_sum_shared(grad_bias, axis, group.entry.name))
    grad_x = None if outcome.total is None else unflatten(outcome.total, kept.shape)
    return Gradients(grad_x, grad_weights, grad_biases)


class ColumnGroupFunction(torch.autograd.Function):
    """Column-parallel linears that read one input: one gather forward, one reduction backward for all of them.

        x_shard     [T/tp, D]       tokens sharded (or whole, in all-reduce mode)
        w_shard     [F/tp, D]       output features sharded, one per member
        x_full      [T, D]          the gathered input, for a module that reads it otherwise
        y_shard     [T, F/tp]       one per member; and what an activation of them gives, of the same shape

        forward     x_full = all_gather(x_shard); y_shard = x_full @ w_shard.T
        dgrad       grad_x_shard = reduce_scatter(grad_x_full + sum of grad_y_shard @ w_shard)
        wgrad       grad_w_shard = grad_y_shard.T @ all_gather(x_shard)     gathered again: only the shard is kept

    A KV weight held by several ranks has its gradient summed over them here. An activation is applied to rows when they
    are complete, and its gradient is computed for rows when dgrad comes to them; for that each y_shard is kept.

    Contract: `contract.linear.derive_column_group`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ColumnGroup, keeps_full: bool, has_backward: bool, *params: Any
    ) -> tuple[Tensor | None, ...]:
        members = len(group.shared_over)
        weights, biases = params[:members], params[members:]
        ctx.group, num_rows = group, group.entry.count_rows(x, is_inside=False)
        ctx.set_materialize_grads(False)
        needs = _find_needs(ctx, members, has_backward=has_backward)
        given, kept_x, ctx.kept = run_forward(
            group, Operands(x, num_rows, weights, biases), needs, keeps_full=keeps_full
        )
        ctx.save_for_backward(kept_x, *weights, *(given.members if group.activation is not None else ()))
        ctx.this = group.entry.matmul.column = _find_backward(group, kept_x, num_rows, needs, weights[0])
        x_full = x.view_as(x) if given.x_full is x else given.x_full
        return (x_full, given.activated, *given.members)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_x_full: Tensor | None, grad_activated: Tensor | None, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        members = len(grad_outputs)
        x, *saved = ctx.saved_tensors
        this, ctx.this = ctx.this, None
        needs = select_half(_find_needs(ctx, members, has_backward=True))
        grads = run_backward(
            ctx.group,
            x,
            ctx.kept,
            saved[:members],
            saved[members:],
            OutputGradients(grad_x_full, grad_outputs, grad_activated),
            needs,
            None if is_split() else this,
        )
        return (grads.x, None, None, None, *grads.weights, *grads.biases)


def _find_needs(ctx: Any, members: int, *, has_backward: bool) -> Needs:
    """None of them where autograd does not look on; of tensors alone that is not known."""
    needs = ctx.needs_input_grad if has_backward else (False,) * len(ctx.needs_input_grad)
    biases = _FIRST_PARAMETER + members
    return Needs(needs[0], needs[_FIRST_PARAMETER:biases], needs[biases:], has_backward)


def _find_backward(group: ColumnGroup, kept_x: Tensor | None, num_rows: int, needs: Needs, like: Tensor) -> Next | None:
    """The pass that follows that of the next row linear in backward, where it gathers something and may be known."""
    # Behind a head comes a loss, and no row linear.
    is_last = group.entry.site.region == "head"
    if not (needs.x and any(needs.weights) and group.entry.is_sharded) or is_last:
        return None
    # Where saved tensors go elsewhere (checkpointing, offloading), to hold on to one would be to keep it here.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    assert kept_x is not None, group.entry.name
    what = group.entry.build_pass(Operation.COLUMN_BACKWARD, num_rows, like.dtype)
    return Next(what, kept_x.detach(), Addends(like.shape[1], like.dtype, like.device))


def _build_activation_gradient(
    group: ColumnGroup, outputs: Sequence[Tensor], grads: OutputGradients
) -> ActivationGradient | None:
    """None where nothing came back through the activation: it was not called with these outputs."""
    if group.activation is None or grads.activated is None:
        return None
    inputs = [flatten(output) for output in outputs]
    own = [torch.empty_like(each) for each in inputs]
    return ActivationGradient(group.activation, flatten(grads.activated), inputs, _flatten(grads.members), own)


def _flatten(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else flatten(each) for each in tensors]


def _sum_shared(grad: Tensor | None, axis: Axis | None, label: str) -> Tensor | None:
    if grad is None or axis is None:
        return grad
    return collectives.apply(_SHARED.backward, grad, axis, split=None, label=label)
