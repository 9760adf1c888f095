"""The attention core, alone or over context-parallel ranks."""

from dataclasses import replace

from plait.contract.op import Op
from plait.contract.step import list_gemms
from plait.planner.cost import Cost, Kind, join
from plait.planner.laws import AttentionShape, Estimate, estimate_flash_attention, estimate_unfused_attention
from plait.planner.laws.attention import BACKWARD_FLOPS, UNFUSED_BACKWARD_FLOPS
from plait.planner.planned import derive_attention
from plait.planner.step.circumstance import Circumstance, build_cost
from plait.planner.step.context import build_meeting, deal_heads
from plait.planner.step.linear import Direction


def build_attention(op: Op, direction: Direction, where: Circumstance) -> Cost:
    """One pass of the core.

    With cp, keys and values go round a ring while those at hand are used: cp steps over S/cp queries and as many keys.
    In zigzag order every rank masks half of each step, so a causal step of that length is what each takes; that all
    keys are there at once changes nothing of it. An exchange leaves one step over all tokens, of a few heads.
    """
    backward, cp = direction == "backward", where.plan.cp
    shape = derive_shape(op, where)
    estimate = _estimate(shape, where, backward=backward)
    compute = build_cost(
        "core", Kind.ATTENTION, estimate, note=f"{shape.batch * shape.heads} heads of {shape.queries} queries",
        efficiency=_count_flops(shape, where, backward=backward) / (estimate.seconds * _peak(where)),
    )  # fmt: skip
    if cp == 1:
        return join(op.name, [compute], note=direction)
    num_steps = 1 if where.plan.context_method == "all_to_all" else cp
    steps = join("steps", [compute], times=num_steps)
    return join(op.name, [steps, *build_meeting(op, where, estimate.seconds, backward=backward)], note=direction)


def derive_shape(op: Op, where: Circumstance) -> AttentionShape:
    """Heads and lengths of the contract's GEMMs; of one step where cp cuts the sequence."""
    scores, batch = list_gemms(op.forward)[0], where.plan.micro_batch
    _, kv_features = op.inputs[1].layout.local_shape(where.contract.setting.rank)
    shape = AttentionShape(
        batch, scores.count // batch, kv_features // scores.k, scores.m, scores.n, scores.k,
        causal=where.plan.fused_attention,
    )  # fmt: skip
    if where.plan.cp == 1 or where.plan.context_method != "all_to_all":
        return shape
    heads, kv_heads = deal_heads(derive_attention(op, where.contract), where.plan.cp)
    tokens = where.plan.cp * scores.m
    return replace(shape, heads=heads, kv_heads=kv_heads, queries=tokens, keys=tokens)


def _estimate(shape: AttentionShape, where: Circumstance, *, backward: bool) -> Estimate:
    """The training derate is one of GEMMs: the rate of fused kernels was fitted without it."""
    if where.plan.fused_attention:
        dtype = where.plan.precision.compute
        return estimate_flash_attention(where.hardware, shape, backward=backward, regime="burst", dtype=dtype)
    return estimate_unfused_attention(where.hardware, shape, backward=backward)


def _count_flops(shape: AttentionShape, where: Circumstance, *, backward: bool) -> float:
    passes = BACKWARD_FLOPS if where.plan.fused_attention else UNFUSED_BACKWARD_FLOPS
    return shape.flops * (passes if backward else 1.0)


def _peak(where: Circumstance) -> float:
    return where.hardware.peak(where.plan.precision.compute).value
