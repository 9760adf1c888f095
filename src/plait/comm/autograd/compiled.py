"""Transitions, and sums of whole parameters' gradients, as operators that torch.compile takes whole.

The compiler keeps the order of operators that are marked `ordered`, which has to be the same on every rank: nothing but
that says which of two gradients is summed first. A label is not given: it would have every layer compiled for itself.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.library import EffectType, custom_op

from plait.comm import collectives
from plait.comm.collectives import DimSplit
from plait.comm.handle import Handled, find_by_handle
from plait.comm.mesh import Axis
from plait.sharding import (
    Interval,
    Invariant,
    Kind,
    Partial,
    Placement,
    Replicate,
    Shard,
    Split,
    Transition,
    derive_transition,
)

Splits = tuple[Split | None, Split | None]
"""How the dim of the state before is cut, and that of the state behind."""

_UNCUT = (Invariant, Replicate, Partial)
_SHARD = len(_UNCUT)
"""The number of the placement that has a dim."""


def ordered(operator: CustomOpDef) -> CustomOpDef:
    """Let no compiler move `operator` before or behind another such one, or leave it out."""
    operator.register_effect(EffectType.ORDERED)
    return operator


# --- transitions -----------------------------------------------------------------------------------------------------


def run_transition(x: Tensor, axis: Axis, transition: Transition, splits: Splits) -> Tensor:
    """As `Redistribute`."""
    source, target = transition.source, transition.target
    shape = list(x.shape)
    if isinstance(source, Shard) and splits[0] is not None:
        shape[source.dim] = splits[0].size
    if isinstance(target, Shard) and splits[1] is not None:
        shape[target.dim] = len(splits[1].intervals[axis.rank])
    states = [*_encode_placement(source), *_encode_placement(target)]
    return redistribute(x, axis.handle, states, _encode_split(splits[0]), _encode_split(splits[1]), shape)


@ordered
@custom_op("plait::redistribute", mutates_args=())
def redistribute(
    x: Tensor, axis: Tensor, states: Sequence[int], before: Sequence[int], behind: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Into a tensor of `shape` of its own."""
    transition = _decode_transition(*states)
    y = apply_transition(transition, x, find_by_handle(axis), (_decode_split(before), _decode_split(behind)), "")
    return y.clone() if y is x else y


@redistribute.register_fake
def _(
    x: Tensor, axis: Tensor, states: Sequence[int], before: Sequence[int], behind: Sequence[int], shape: Sequence[int]
) -> Tensor:
    return x.new_empty(shape)


def _keep_transition(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, axis, ctx.states, ctx.before, ctx.behind, _ = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(axis)


def _run_transition_backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    (axis,) = ctx.saved_tensors
    conjugate = _decode_transition(*ctx.states).conjugate
    states = [*_encode_placement(conjugate.source), *_encode_placement(conjugate.target)]
    grad_x = redistribute(grad_y, axis, states, ctx.behind, ctx.before, ctx.shape)
    return grad_x, None, None, None, None, None


redistribute.register_autograd(_run_transition_backward, setup_context=_keep_transition)


def apply_transition(transition: Transition, x: Tensor, axis: Axis, splits: Splits, label: str) -> Tensor:
    """What a row of the table does forward."""
    source, target = transition.source, transition.target
    scatter: DimSplit | None = None
    if isinstance(source, Shard):
        dim, split = source.dim, splits[0]
        if isinstance(target, Shard) and splits[1] is not None:
            scatter = (target.dim, splits[1])
    else:
        dim, split = (target.dim if isinstance(target, Shard) else 0), splits[1]
    return collectives.apply(transition.forward, x, axis, split=split, dim=dim, scatter=scatter, label=label)


def _encode_placement(placement: Placement) -> tuple[int, int]:
    return (_SHARD, placement.dim) if isinstance(placement, Shard) else (_UNCUT.index(type(placement)), 0)


def _encode_split(split: Split | None) -> list[int]:
    if split is None:
        return []
    return [edge for interval in split.intervals for edge in (interval.start, interval.stop)]


@lru_cache(maxsize=256)
def _decode_transition(source: int, source_dim: int, target: int, target_dim: int) -> Transition:
    return derive_transition(_decode_placement(source, source_dim), _decode_placement(target, target_dim))


def _decode_placement(kind: int, dim: int) -> Placement:
    return Shard(dim) if kind == _SHARD else _UNCUT[kind]()


def _decode_split(edges: Sequence[int]) -> Split | None:
    if not edges:
        return None
    return Split(max(edges), tuple(Interval(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)))


# --- parameters used on own tokens -----------------------------------------------------------------------------------


class Use(Handled):
    """Whole parameters, used by each rank of an axis on its own part of the work."""

    def __init__(self, axis: Axis, name: str) -> None:
        self.axis, self.name = axis, name
        self._register()

    def sum_gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Those of all parameters in one all-reduce."""
        flat = grads[0].flatten() if len(grads) == 1 else torch.cat([grad.flatten() for grad in grads])
        total = collectives.apply(_USE.backward, flat, self.axis, split=None, label=self.name)
        pieces = total.split([grad.numel() for grad in grads])
        return [piece.view(grad.shape) for piece, grad in zip(pieces, grads, strict=True)]


_USE = derive_transition(Invariant(), Replicate())
"""Parameters that every rank holds alike and uses on its own tokens: the f operator of Megatron-LM."""

assert _USE.forward is Kind.NOTHING, _USE


@custom_op("plait::use_on_own_tokens", mutates_args=())
def use_on_own_tokens(params: Sequence[Tensor], use: Tensor) -> list[Tensor]:
    """Copies of `params`, which are small: no output of an operator may be its input."""
    return [param.clone() for param in params]


@use_on_own_tokens.register_fake
def _(params: Sequence[Tensor], use: Tensor) -> list[Tensor]:
    return [torch.empty_like(param) for param in params]


@ordered
@custom_op("plait::sum_gradients", mutates_args=())
def sum_gradients(grads: Sequence[Tensor], use: Tensor) -> list[Tensor]:
    """As `Use.sum_gradients`."""
    found: Use = find_by_handle(use)
    return [grad.clone() for grad in found.sum_gradients(grads)]


@sum_gradients.register_fake
def _(grads: Sequence[Tensor], use: Tensor) -> list[Tensor]:
    return [grad.new_empty(grad.shape) for grad in grads]


def _keep_use(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[1])


def _run_use_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (use,) = ctx.saved_tensors
    return sum_gradients(grads, use), None


use_on_own_tokens.register_autograd(_run_use_backward, setup_context=_keep_use)
