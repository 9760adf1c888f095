"""What attention over a context axis is told once per pass: the axis, the method, the tokens and what sees what."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.mesh import Axis
from plait.contract.context.attention import ContextMethod, ContextPlan, build_plan
from plait.contract.context.mask import AttentionMask
from plait.errors import ConfigError, ShardingError, describe_nearest
from plait.sharding.token_order import Order, TokenOrder, build_order


@dataclass(frozen=True)
class Context:
    """Attributes: order says which tokens of a sequence each rank of `axis` has."""

    axis: Axis
    method: ContextMethod
    order: TokenOrder

    def __post_init__(self) -> None:
        if self.order.degree != self.axis.degree:
            raise ShardingError(
                f"tokens are dealt to {self.order.degree} ranks, but axis {self.axis.name!r} "
                f"is of degree {self.axis.degree}"
            )

    @property
    def num_own_tokens(self) -> int:
        """Tokens of this rank."""
        return self.order.split.lengths[self.axis.rank]


@dataclass(frozen=True)
class Site:
    """One attention under way: where, of what, under which name in traces and errors.

    Attributes:
        scale: of the scores.
        sum_dtype: in which gradients of keys and values are summed over ranks.
    """

    context: Context
    plan: ContextPlan
    scale: float
    sum_dtype: torch.dtype
    label: str

    @property
    def axis(self) -> Axis:
        """The ranks that share the sequence."""
        return self.context.axis


def build_context(
    axis: Axis,
    size: int,
    *,
    method: ContextMethod | str = ContextMethod.RING,
    order: Order | str = Order.ZIGZAG,
) -> Context:
    """Deal a sequence of `size` tokens to the ranks of `axis`, each of which has to do the same.

    Raises:
        ConfigError: there is no such method or order.
    """
    for what, name, known in (("method", method, ContextMethod), ("order", order, Order)):
        if name not in list(known):
            raise ConfigError(f"context {what} {name!r} is not known", hint=describe_nearest(name, known))
    return Context(axis, ContextMethod(method), build_order(Order(order), size, axis.degree))


def check_tensors(q: Tensor, k: Tensor, v: Tensor, context: Context, mask: AttentionMask, label: str) -> ContextPlan:
    """Check that the tensors are of this rank's tokens, and fit each other.

    Raises:
        ShardingError: they do not; the message names the shapes.
    """
    batch, tokens = q.shape[0], context.num_own_tokens
    mask.check_fits(batch, context.order.size)
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    axis = context.axis
    if q.ndim != 4 or k.shape != v.shape or k.shape[::2] != (batch, tokens) or q.shape[2] != tokens:
        raise ShardingError(
            f"{label}: rank {axis.rank} on {axis.name!r} of degree {axis.degree} has {shapes}, but they should be "
            f"[B, N, {tokens}, H] and [B, K, {tokens}, H]: its tokens of {context.order.size}",
            hint="tokens.take_own takes them; tokens are dim 2 here, as in scaled_dot_product_attention",
        )
    if q.shape[3] != k.shape[3] or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ShardingError(
            f"{label}: {shapes}: {q.shape[1]} query heads do not read {k.shape[1]} KV heads of the same width",
            hint="the number of query heads must be a multiple of the number of KV heads",
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ShardingError(f"{label}: {q.dtype} queries, {k.dtype} keys and {v.dtype} values: they have to be alike")
    return build_plan(context.order, mask, batch)
