"""What brings queries and keys of different context ranks together, as the contract says, in zigzag order.

ring          keys and values of the next step travel beneath this one; in backward their gradients travel as well
all_gather    all keys and values before the first score, and a sum of all their gradients behind the last
all_to_all    tokens for heads, before and behind; each rank then has whole sequences of a few heads
"""

from functools import lru_cache

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
    """Collectives of one attention; a ring of which all need all amounts to those of an all-gather."""
    plan = ContextPlan(build_order(Order.ZIGZAG, seq_len, cp), CAUSAL, size.batch)
    alike = ContextMethod.ALL_GATHER if method is ContextMethod.RING else method
    return derive_context_traffic(plan, size, alike)


def build_meeting(op: Op, where: Circumstance, step_s: float, *, backward: bool) -> list[Cost]:
    """What moves in one pass beside, before and behind steps of `step_s`."""
    cp, setting, method = where.plan.cp, where.contract.setting, ContextMethod(where.plan.context_method)
    size = derive_attention(op, where.contract)
    traffic = derive_zigzag_traffic(size, cp * setting.seq_len, cp, method)
    collectives = (traffic.backward if backward else traffic.forward).collectives
    if method is not ContextMethod.RING:
        placement = where.place("cp")
        return [
            build_cost(
                str(each), Kind.COMMUNICATION,
                estimate_collective(
                    where.hardware, COLLECTIVE_LAWS[each.kind], each.payload_bytes, cp, placement=placement
                ),
                collectives=(each,),
            )
            for each in collectives
        ]  # fmt: skip
    numel = 2 * setting.num_tokens * size.num_kv_heads * size.head_width
    num_bytes = numel * (width_bytes(size.dtype) + (width_bytes(size.sum_dtype) if backward else 0))
    one = estimate_p2p(where.hardware, num_bytes, local=where.place("cp").is_local)
    exposed_s = (cp - 1) * max(0.0, one.seconds - step_s)
    leaf = build_leaf(
        "ring of keys and values", Kind.COMMUNICATION, exposed_s, one.uncertainty, constants=one.constants,
        hidden_s=(cp - 1) * one.seconds - exposed_s, collectives=collectives,
    )  # fmt: skip
    return [leaf]
