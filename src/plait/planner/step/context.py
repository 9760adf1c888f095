"""What brings queries and keys of different context ranks together, as the contract says, in zigzag order.

ring          keys and values of the next step travel beneath this one; in backward their gradients travel as well
all_gather    all keys and values before the first score, and a sum of all their gradients behind the last
all_to_all    tokens for heads, before and behind; each rank then has whole sequences of a few heads
"""

from functools import lru_cache

from plait.contract.collective import Collective
from plait.contract.context.attention import AttentionSize, ContextMethod, ContextPlan
from plait.contract.context.heads import split_heads
from plait.contract.context.mask import CAUSAL
from plait.contract.context.traffic import ContextTraffic, derive_context_traffic
from plait.contract.op import Op
from plait.dtype import width_bytes
from plait.planner.cost import Cost, Kind, build_leaf
from plait.planner.laws import estimate_collective, estimate_p2p
from plait.planner.planned import derive_attention
from plait.planner.step.circumstance import COLLECTIVE_LAWS, Circumstance, build_cost
from plait.sharding.token_order import Order, build_order


def deal_heads(size: AttentionSize, cp: int) -> tuple[int, int]:
    """Query heads and KV heads of the rank that an exchange gives most."""
    return max(split_heads(size.num_heads, size.num_kv_heads, cp))


@lru_cache(maxsize=4096)
def derive_zigzag_traffic(size: AttentionSize, seq_len: int, cp: int, method: ContextMethod) -> ContextTraffic:
    """Collectives of one attention."""
    return derive_context_traffic(ContextPlan(build_order(Order.ZIGZAG, seq_len, cp), CAUSAL, size.batch), size, method)


def build_meeting(op: Op, where: Circumstance, step_s: float, *, backward: bool) -> list[Cost]:
    """What moves in one pass beside, before and behind steps of `step_s`."""
    cp, method = where.plan.cp, ContextMethod(where.plan.context_method)
    size = derive_attention(op, where.contract)
    if method is ContextMethod.RING:
        return [_build_ring(size, where, step_s, backward=backward)]
    traffic = derive_zigzag_traffic(size, cp * where.contract.setting.seq_len, cp, method)
    placement = where.place("cp")

    def build(each: Collective) -> Cost:
        law = COLLECTIVE_LAWS[each.kind]
        estimate = estimate_collective(where.hardware, law, each.payload_bytes, cp, placement=placement)
        return build_cost(str(each), Kind.COMMUNICATION, estimate, collectives=(each,))

    return [build(each) for each in (traffic.backward if backward else traffic.forward).collectives]


def _build_ring(size: AttentionSize, where: Circumstance, step_s: float, *, backward: bool) -> Cost:
    """In zigzag order all need the keys of all, so each block goes all the way round."""
    hops = where.plan.cp - 1
    numel = 2 * where.contract.setting.num_tokens * size.num_kv_heads * size.head_width
    num_bytes = numel * (width_bytes(size.dtype) + (width_bytes(size.sum_dtype) if backward else 0))
    one = estimate_p2p(where.hardware, num_bytes, local=where.place("cp").is_local)
    exposed_s = hops * max(0.0, one.seconds - step_s)
    return build_leaf(
        "ring of keys and values", Kind.COMMUNICATION, exposed_s, one.uncertainty, constants=one.constants,
        hidden_s=hops * one.seconds - exposed_s, note=f"{hops * num_bytes} B sent",
    )  # fmt: skip
