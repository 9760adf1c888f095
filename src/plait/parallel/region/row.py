"""The pass through a row-parallel linear, forward and backward, and as autograd sees it."""

from typing import Any

import torch
from torch import Tensor

from plait.comm.autograd.once import once_differentiable
from plait.overlap.ahead import Next
from plait.overlap.execute import Addends
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.gemm import RowDgrad, RowForward, RowWgrad
from plait.parallel.region.half import is_split, select_half
from plait.parallel.region.matrix import flatten, payload_of, sum_rows, unflatten
from plait.parallel.region.quantizer import Kept, Needs
from plait.schedule.work import Operation

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, weight and bias: those that are wanted."""


def run_forward(
    exit: Boundary, x: Tensor, num_rows: int, weight: Tensor, bias: Tensor | None, needs: Needs
) -> tuple[Tensor, Tensor | None, Kept]:
    """Reduce the products; the bias is added to their sum. What of the input wgrad reads is to be kept."""
    exit.check_dtype(x, weight, bias)
    width = weight.shape[0]
    reading = exit.quantizer.read(x, num_rows, [weight], needs)
    outcome = exit.matmul.run(
        exit.build_pass(Operation.ROW_FORWARD, num_rows, x.dtype),
        gemms={"forward": RowForward(reading.x, reading.weights[0])},
        addends=Addends(width, x.dtype, x.device),
    )
    assert outcome.total is not None, exit.name
    y = outcome.total if bias is None else outcome.total.add_(bias)
    y = y.view(*x.shape[:-1], width) if x.dim() > 2 else y
    return y, reading.kept, Kept(reading.memory, x.shape, num_rows)


def run_backward(
    exit: Boundary,
    grad_y: Tensor,
    kept_x: Tensor | None,
    kept: Kept,
    weight: Tensor,
    needs: Needs,
    following: Next | None = None,
) -> Gradients:
    """Gather the gradient, and multiply it with the weight and with the input."""
    (needs_weight,), (needs_bias,) = needs.weights, needs.biases
    x, (factor,) = exit.quantizer.read_again(kept_x, kept.memory, [weight], needs)
    reading = exit.quantizer.read_gradients([flatten(grad_y)], kept.memory, needs, None)
    (grad,) = reading.biases
    assert grad is not None, exit.name
    dgrad = RowDgrad(reading.dgrad[0], factor, grad_y.new_empty(kept.num_rows, kept.shape[-1]) if needs.x else None)
    wgrad = RowWgrad(reading.wgrad[0], x, weight, [None])
    outcome = exit.matmul.run(
        exit.build_pass(Operation.ROW_BACKWARD, kept.num_rows, weight.dtype, (needs.x, needs_weight)),
        gemms={"dgrad": dgrad, "wgrad": wgrad},
        shard=payload_of(grad),
        following=following,
    )
    grad_bias = sum_rows(grad, outcome.full, weight.dtype) if needs_bias else None
    grad_x = None if dgrad.grad_x is None else unflatten(dgrad.grad_x, kept.shape)
    return grad_x, wgrad.grad_weight[0], grad_bias


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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exit: Boundary, has_backward: bool) -> Tensor:
        ctx.exit, num_rows = exit, exit.count_rows(x, is_inside=True)
        ctx.following, exit.matmul.column = exit.matmul.column, None
        needs = _find_needs(ctx, has_backward=has_backward)
        y, kept_x, ctx.kept = run_forward(exit, x, num_rows, weight, bias, needs)
        ctx.save_for_backward(kept_x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Once only: what it gathers is to be freed as soon as the pass that saved it is through.
        following, ctx.following = ctx.following, None
        needs, following = select_half(_find_needs(ctx, has_backward=True)), None if is_split() else following
        return (*run_backward(ctx.exit, grad_y, x, ctx.kept, weight, needs, following), None, None)


class KeepRow(torch.autograd.Function):
    """Keeps for backward what `RowFunction` would, and gives nothing that may be read: memory, as it comes.

    For a forward that is computed again though its result is there. What quantizes agrees on magnitudes all the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exit: Boundary) -> Tensor:
        num_rows = exit.count_rows(x, is_inside=True)
        reading = exit.quantizer.read(x, num_rows, [weight], _find_needs(ctx, has_backward=True))
        ctx.save_for_backward(reading.kept, weight)
        shape = x.shape[:-1] if x.dim() > 2 else (exit.count_outside(num_rows),)
        return x.new_empty(*shape, weight.shape[0])


def _find_needs(ctx: Any, *, has_backward: bool) -> Needs:
    """None of them where autograd does not look on; of tensors alone that is not known."""
    x, weight, bias = ctx.needs_input_grad[:3] if has_backward else (False, False, False)
    return Needs(x, (weight,), (bias,), has_backward)
