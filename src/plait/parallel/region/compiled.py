"""The passes of parallel linears as operators that torch.compile takes whole: tensors and numbers in, tensors out.

A compiler sees shapes and gradients, not what runs inside: schedules, transports and what is recorded are those of
eager mode. They are ordered, among themselves and with those of `plait.comm.autograd.compiled`: every rank has to issue
the same collectives, one after the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.comm.autograd.compiled import ordered
from plait.comm.handle import find_by_handle
from plait.errors import ConfigError
from plait.parallel.region import column, row
from plait.parallel.region.boundary import Boundary
from plait.parallel.region.column import ColumnGroup, Operands, OutputGradients, Outputs
from plait.parallel.region.quantizer import PLAIN, Kept, Needs


def check_compilable(boundary: Boundary) -> None:
    """Refuse what no operator does.

    Raises:
        ConfigError: the linears are quantized: what backward reads of them is made in forward.
    """
    if boundary.quantizer is not PLAIN:
        raise ConfigError(
            f"{boundary.name}: quantized linears are not compiled",
            hint="compile without quantization, or compile only what is between them",
        )


# --- column groups ---------------------------------------------------------------------------------------------------


def run_column_group(
    x: Tensor, group: ColumnGroup, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keeps_full: bool
) -> Outputs:
    """As `ColumnGroupFunction`.

    Raises:
        ConfigError: its linears are quantized.
    """
    check_compilable(group.entry)
    num_rows = group.entry.count_rows(x, is_inside=False)
    given = [bias for bias in biases if bias is not None]
    has_bias = [bias is not None for bias in biases]
    is_activated = group.activation is not None
    outputs = column_group(
        x.flatten(0, -2), list(weights), given, has_bias, group.handle, num_rows, [keeps_full, is_activated]
    )
    if x.dim() > 2:
        outputs = [output.unflatten(0, x.shape[:-1]) for output in outputs]
    return _name_outputs(outputs, keeps_full=keeps_full, is_activated=is_activated)


@ordered
@torch.library.custom_op("plait::column_group", mutates_args=())
def column_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    handle: Tensor,
    num_rows: int,
    extra: Sequence[bool],
) -> list[Tensor]:
    """The gathered input if `extra[0]`, every member's output, and their activation if `extra[1]`."""
    group: ColumnGroup = find_by_handle(handle)
    given = iter(biases)
    every = [next(given) if has else None for has in has_bias]
    group.entry.matmul.column = None  # nothing is begun ahead for a compiled backward
    needs = Needs(True, [True] * len(weights), has_bias)
    outputs, *_ = column.run_forward(group, Operands(x, num_rows, weights, every), needs, keeps_full=extra[0])
    # No output of an operator may be its input.
    x_full = x.clone() if outputs.x_full is x else outputs.x_full
    return [each for each in (x_full, *outputs.members, outputs.activated) if each is not None]


@column_group.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    has_bias: Sequence[bool],
    handle: Tensor,
    num_rows: int,
    extra: Sequence[bool],
) -> list[Tensor]:
    members = [x.new_empty(num_rows, weight.shape[0]) for weight in weights]
    full = [x.new_empty(num_rows, x.shape[1])] if extra[0] else []
    return [*full, *members, *([torch.empty_like(members[0])] if extra[1] else [])]


@ordered
@torch.library.custom_op("plait::column_group_backward", mutates_args=())
def column_group_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    handle: Tensor,
    num_rows: int,
    extra: Sequence[bool],
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients that `needs` names of x, every weight and every bias, without those that do not exist."""
    named = _name_outputs(list(grads), keeps_full=extra[0], is_activated=extra[1])
    found = column.run_backward(
        find_by_handle(handle),
        x,
        Kept(None, x.shape, num_rows),
        weights,
        outputs,
        OutputGradients(named.x_full, named.members, named.activated),
        Needs(needs[0], needs[1 : 1 + len(weights)], needs[1 + len(weights) :]),
    )
    return [grad for grad in (found.x, *found.weights, *found.biases) if grad is not None]


@column_group_backward.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    handle: Tensor,
    num_rows: int,
    extra: Sequence[bool],
    needs: Sequence[bool],
) -> list[Tensor]:
    exists = _list_existing(grads, len(weights), extra, needs)
    like = [x, *weights, *(weight[:, 0] for weight in weights)]
    return [each.new_empty(each.shape) for each, is_there in zip(like, exists, strict=True) if is_there]


def _keep_column(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.has_bias, handle, ctx.num_rows, ctx.extra = inputs
    ctx.members = len(weights)
    kept = _name_outputs(output, keeps_full=ctx.extra[0], is_activated=True).members if ctx.extra[1] else []
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, handle, *weights, *kept)


def _run_column_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, handle, *kept = ctx.saved_tensors
    weights, outputs = kept[: ctx.members], kept[ctx.members :]
    needs_x, needs_weights, needs_biases, *_ = ctx.needs_input_grad
    needs_given = iter(needs_biases)
    needs = [needs_x, *needs_weights, *(has and next(needs_given) for has in ctx.has_bias)]
    found = iter(column_group_backward(x, weights, outputs, list(grads), handle, ctx.num_rows, ctx.extra, needs))
    exists = _list_existing(grads, ctx.members, ctx.extra, needs)
    every = [next(found) if is_there else None for is_there in exists]
    biases = [grad for grad, has in zip(every[1 + ctx.members :], ctx.has_bias, strict=True) if has]
    return every[0], every[1 : 1 + ctx.members], biases, None, None, None, None


column_group.register_autograd(_run_column_backward, setup_context=_keep_column)


def _list_existing(
    grads: Sequence[Tensor | None], members: int, extra: Sequence[bool], needs: Sequence[bool]
) -> list[bool]:
    """Which gradients of x, weights and biases are wanted and exist: a member nobody read has none."""
    named = _name_outputs(list(grads), keeps_full=extra[0], is_activated=extra[1])
    is_read = [named.activated is not None or grad is not None for grad in named.members]
    return [needs[0], *(need and read for need, read in zip(needs[1:], is_read * 2, strict=True))]


def _name_outputs(outputs: list[Any], *, keeps_full: bool, is_activated: bool) -> Outputs:
    members = outputs[1 if keeps_full else 0 : -1 if is_activated else None]
    return Outputs(outputs[0] if keeps_full else None, members, outputs[-1] if is_activated else None)


# --- row linears -----------------------------------------------------------------------------------------------------


def run_row(x: Tensor, weight: Tensor, bias: Tensor | None, exit: Boundary) -> Tensor:
    """As `RowFunction`.

    Raises:
        ConfigError: the linear is quantized.
    """
    check_compilable(exit)
    num_rows = exit.count_rows(x, is_inside=True)
    y = row_linear(x.flatten(0, -2), weight, bias, exit.handle, num_rows, exit.count_outside(num_rows))
    return y.unflatten(0, x.shape[:-1]) if x.dim() > 2 else y


@ordered
@torch.library.custom_op("plait::row_linear", mutates_args=())
def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, num_rows: int, rows: int) -> Tensor:
    """`rows` of the sum are this rank's."""
    exit: Boundary = find_by_handle(handle)
    exit.matmul.column = None  # nor by one
    y, *_ = row.run_forward(exit, x, num_rows, weight, bias, Needs(True, [True], [bias is not None]))
    return y


@row_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, num_rows: int, rows: int) -> Tensor:
    return x.new_empty(rows, weight.shape[0])


@ordered
@torch.library.custom_op("plait::row_linear_backward", mutates_args=())
def row_linear_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, handle: Tensor, num_rows: int, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients that `needs` names of x, weight and bias."""
    wanted = Needs(needs[0], [needs[1]], [needs[2]])
    kept = Kept(None, x.shape, num_rows)
    found = row.run_backward(find_by_handle(handle), grad_y, x, kept, weight, wanted)
    return [grad for grad in found if grad is not None]


@row_linear_backward.register_fake
def _(grad_y: Tensor, x: Tensor, weight: Tensor, handle: Tensor, num_rows: int, needs: Sequence[bool]) -> list[Tensor]:
    like = (x, weight, weight[:, 0])
    return [each.new_empty(each.shape) for each, is_wanted in zip(like, needs, strict=True) if is_wanted]


def _keep_row(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, handle, ctx.num_rows, _ = inputs
    ctx.save_for_backward(x, weight, handle)


def _run_row_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, handle = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = iter(row_linear_backward(grad_y, x, weight, handle, ctx.num_rows, needs))
    return (*(next(found) if is_wanted else None for is_wanted in needs), None, None, None)


row_linear.register_autograd(_run_row_backward, setup_context=_keep_row)
