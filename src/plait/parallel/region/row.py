"""The pass through a row-parallel linear, forward and backward, and as autograd sees it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.overlap.ahead import Next
from plait.overlap.execute import Addends
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.gemm import RowDgrad, RowForward, RowWgrad
from plait.schedule.work import Operation

Needs = tuple[bool, bool, bool]
"""Whether the gradients of x, weight and bias are wanted."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, weight and bias: those that are wanted."""


def run_forward(exit: Boundary, x: Tensor, num_rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Reduce the products; the bias is added to their sum."""
    exit.check_dtype(x, weight, bias)
    width = weight.shape[0]
    outcome = exit.run(
        Operation.ROW_FORWARD,
        num_rows,
        {"forward": RowForward(x.flatten(0, -2), weight)},
        addends=Addends(width, x.dtype, x.device),
    )
    assert outcome.total is not None, exit.name
    y = outcome.total if bias is None else outcome.total.add_(bias)
    return y.view(*x.shape[:-1], width) if x.dim() > 2 else y


def run_backward(
    exit: Boundary,
    grad_y: Tensor,
    x: Tensor,
    num_rows: int,
    weight: Tensor,
    needs: Needs,
    following: Next | None = None,
) -> Gradients:
    """Gather the gradient, and multiply it with the weight and with the input."""
    needs_x, needs_weight, needs_bias = needs
    rows_x, rows_grad = x.flatten(0, -2), grad_y.flatten(0, -2)
    dgrad = RowDgrad(rows_grad, weight, torch.empty_like(rows_x) if needs_x else None)
    wgrad = RowWgrad(rows_grad, rows_x, torch.empty_like(weight) if needs_weight else None)
    outcome = exit.run(
        Operation.ROW_BACKWARD,
        num_rows,
        {"dgrad": dgrad, "wgrad": wgrad},
        shard=rows_grad,
        needs=(needs_x, needs_weight),
        following=following,
    )
    grad_bias = (rows_grad if outcome.full is None else outcome.full).sum(0) if needs_bias else None
    return None if dgrad.grad_x is None else dgrad.grad_x.view(x.shape), wgrad.grad_weight, grad_bias


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
        ctx.following, exit.matmul.column = exit.matmul.column, None
        return run_forward(exit, x, ctx.num_rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # Once only: what it gathers is to be freed as soon as the pass that saved it is through.
        following, ctx.following = ctx.following, None
        needs = ctx.needs_input_grad[:3]
        return (*run_backward(ctx.exit, grad_y, x, ctx.num_rows, weight, needs, following), None)
