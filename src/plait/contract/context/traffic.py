"""What attention over a context axis moves: collectives of a rank, and each message of the ring with its bytes.

Keys and values of the ring travel in their own dtype, the sums of their gradients in the one in which they are summed.
A ring has messages alone: they go no further than somebody sees them, so they amount to no collective.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from plait.contract.collective import Collective
from plait.contract.context.attention import AttentionSize, ContextMethod, ContextPlan
from plait.contract.context.heads import split_heads
from plait.contract.context.needs import Needs
from plait.dtype import width_bytes
from plait.sharding import Kind

KV, DKV = "kv", "dkv"
"""Names of what travels round the ring."""


@dataclass(frozen=True)
class Passage:
    """One message: the keys and values of `owner`, or the sum of gradients for them."""

    tensor: str
    owner: int
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What moves in one pass: collectives in order as a trace records them, and messages between all ranks."""

    collectives: tuple[Collective, ...] = ()
    passages: tuple[Passage, ...] = ()

    def sent_bytes(self, rank: int) -> float:
        """What `rank` sends: its messages, and what its collectives take at least."""
        messages = sum(passage.num_bytes for passage in self.passages if passage.source == rank)
        return messages + sum(collective.wire_bytes_per_rank for collective in self.collectives)


@dataclass(frozen=True)
class ContextTraffic:
    """What moves in forward and in backward."""

    forward: Traffic
    backward: Traffic


def derive_context_traffic(
    plan: ContextPlan, size: AttentionSize, method: ContextMethod, axis: str = "cp"
) -> ContextTraffic:
    """Derive what moves; nothing where there is one rank.

    Raises:
        ShardingError: heads are to be dealt by `all_to_all`, and there are not enough of them.
    """
    if plan.degree == 1:
        return ContextTraffic(Traffic(), Traffic())
    if method is ContextMethod.ALL_TO_ALL:
        return _derive_exchange(plan, size, axis)
    shape = (plan.order.size, 2, size.batch, size.num_kv_heads, size.head_width)
    if method is ContextMethod.ALL_GATHER:
        gather = Collective(Kind.ALL_GATHER, axis, plan.degree, shape, size.dtype)
        scatter = Collective(Kind.REDUCE_SCATTER, axis, plan.degree, shape, size.sum_dtype)
        return ContextTraffic(Traffic((gather,)), Traffic((gather, scatter)))
    needs = plan.needs
    token_bytes = prod(shape[1:]) * width_bytes(size.dtype)
    sum_bytes = prod(shape[1:]) * width_bytes(size.sum_dtype)
    values = tuple(_list_passages(plan, needs, token_bytes))
    sums = tuple(_list_sum_passages(plan, needs, sum_bytes))
    return ContextTraffic(Traffic(passages=values), Traffic(passages=(*values, *sums)))


def _list_passages(plan: ContextPlan, needs: Needs, token_bytes: int) -> Iterable[Passage]:
    """Keys travel as far as the last rank that needs them."""
    for owner, reach in enumerate(needs.reach):
        num_bytes = plan.order.split.lengths[owner] * token_bytes
        for hop in range(reach):
            source = (owner + hop) % plan.degree
            yield Passage(KV, owner, source, (source + 1) % plan.degree, num_bytes)


def _list_sum_passages(plan: ContextPlan, needs: Needs, token_bytes: int) -> Iterable[Passage]:
    """Sums begin with the first rank behind the owner that adds to them, and go home from the last."""
    for owner, hops in enumerate(needs.hops):
        num_bytes = plan.order.split.lengths[owner] * token_bytes
        for hop in range(hops[0], hops[-1] + 1) if hops else ():
            source = (owner + hop) % plan.degree
            target = owner if hop == hops[-1] else (source + 1) % plan.degree
            yield Passage(DKV, owner, source, target, num_bytes)


def _derive_exchange(plan: ContextPlan, size: AttentionSize, axis: str) -> ContextTraffic:
    """Queries, keys and values go together, and come back as outputs; gradients the same ways back."""
    heads = split_heads(size.num_heads, size.num_kv_heads, plan.degree)
    packed = sum(query + 2 * kv for query, kv in heads)
    length = plan.order.size

    def exchange(num_heads: int, dim: int) -> Collective:
        shape = (length, num_heads, size.batch, size.head_width)
        return Collective(Kind.ALL_TO_ALL, axis, plan.degree, shape, size.dtype, dim)

    return ContextTraffic(
        Traffic((exchange(packed, 1), exchange(size.num_heads, 0))),
        Traffic((exchange(size.num_heads, 1), exchange(packed, 0))),
    )
