"""The attention core, alone or round a ring of context-parallel ranks."""

from plait.contract.op import Op
from plait.contract.step import Gemm, list_gemms
from plait.dtype import width_bytes
from plait.planner.cost import Cost, Kind, build_leaf, join
from plait.planner.laws import (
    AttentionShape,
    Estimate,
    estimate_flash_attention,
    estimate_p2p,
    estimate_unfused_attention,
)
from plait.planner.laws.attention import BACKWARD_FLOPS, UNFUSED_BACKWARD_FLOPS
from plait.planner.step.circumstance import Circumstance, build_cost
from plait.planner.step.linear import Direction


def build_attention(op: Op, direction: Direction, where: Circumstance) -> Cost:
    """One pass of the core.

    With cp, keys and values go round a ring while those at hand are used: cp steps over S/cp queries and as many keys.
    In zigzag order every rank masks half of each step, so a causal step of that length is what each takes.
    """
    backward, cp = direction == "backward", where.plan.cp
    shape = derive_shape(op, where)
    estimate = _estimate(shape, where, backward=backward)
    scores = _find_scores(op)
    compute = build_cost(
        "core", Kind.ATTENTION, estimate, note=f"{scores.count} heads of {scores.m} queries",
        efficiency=_count_flops(shape, where, backward=backward) / (estimate.seconds * _peak(where)),
    )  # fmt: skip
    steps = join("ring steps", [compute], times=cp) if cp > 1 else compute
    return join(op.name, [steps, *_build_ring(op, where, estimate.seconds, backward=backward)], note=direction)


def derive_shape(op: Op, where: Circumstance) -> AttentionShape:
    """Heads and lengths of the contract's GEMMs; of one step of the ring where cp cuts the sequence."""
    scores, batch = _find_scores(op), where.plan.micro_batch
    _, kv_features = op.inputs[1].layout.local_shape(where.contract.setting.rank)
    return AttentionShape(
        batch, scores.count // batch, kv_features // scores.k, scores.m, scores.n, scores.k,
        causal=where.plan.fused_attention,
    )  # fmt: skip


def _find_scores(op: Op) -> Gemm:
    return list_gemms(op.forward)[0]


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


def _build_ring(op: Op, where: Circumstance, step_s: float, *, backward: bool) -> list[Cost]:
    """Keys and values of the next step travel beneath this one; in backward their gradients travel as well."""
    cp, setting = where.plan.cp, where.contract.setting
    if cp == 1:
        return []
    numel = sum(rows * columns for rows, columns in (x.layout.local_shape(setting.rank) for x in op.inputs[1:]))
    widths = [setting.dtype, *([setting.sum_dtype] if backward else [])]
    num_bytes = numel * sum(map(width_bytes, widths))
    one = estimate_p2p(where.hardware, num_bytes, local=where.place("cp").is_local)
    exposed_s = (cp - 1) * max(0.0, one.seconds - step_s)
    leaf = build_leaf(
        "ring of keys and values", Kind.COMMUNICATION, exposed_s, one.uncertainty, constants=one.constants,
        hidden_s=(cp - 1) * one.seconds - exposed_s,
    )  # fmt: skip
    return [leaf]
