"""The rows of the transition table as one differentiable operation."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from plait.comm.autograd import compiled
from plait.comm.mesh import Axis
from plait.sharding import Kind, Placement, Split, Transition, derive_transition

_derive = lru_cache(maxsize=256)(derive_transition)


def redistribute(
    x: Tensor,
    axis: Axis,
    source: Placement,
    target: Placement,
    *,
    split: Split | None = None,
    target_split: Split | None = None,
    label: str = "",
) -> Tensor:
    """Bring `x` from one state on an axis into another; its gradient goes the derived way back.

    `split` says how the dim of the `Shard` among them is cut; between two shards, how that of `source` is, and
    `target_split` how that of `target` is.

    Raises:
        ShardingError: the table has no such transition, or `x` is not what `source` says.
    """
    # A compiler looks into what remembers results, and says so.
    transition = (derive_transition if torch.compiler.is_compiling() else _derive)(source, target)
    if axis.degree == 1 or (transition.forward is Kind.NOTHING and transition.backward is Kind.NOTHING):
        return x
    splits = (split, split if target_split is None else target_split)
    if torch.compiler.is_compiling():
        return compiled.run_transition(x, axis, transition, splits)
    return Redistribute.apply(x, axis, transition, splits, label)


class Redistribute(torch.autograd.Function):
    """One row of the transition table.

        forward     y = transition.forward(x)
        backward    grad_x = transition.backward(grad_y), itself a row of the table

    A gradient that nothing asked for arrives as zeros: every rank issues its collective all the same.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, transition: Transition, splits: compiled.Splits, label: str) -> Tensor:
        ctx.axis, ctx.transition, ctx.splits, ctx.label = axis, transition, splits, label
        return compiled.apply_transition(transition, x, axis, splits, label)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        conjugate = _conjugate(ctx.transition)
        grad_x = Redistribute.apply(grad_y, ctx.axis, conjugate, ctx.splits[::-1], ctx.label)
        return grad_x, None, None, None, None


@lru_cache(maxsize=256)
def _conjugate(transition: Transition) -> Transition:
    return transition.conjugate
