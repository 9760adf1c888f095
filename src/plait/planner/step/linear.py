"""The linears of a contract: GEMMs, quantise passes and collectives of one operation, forward and backward."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Literal

from plait.config.overlap import OverlapConfig
from plait.contract.op import Op
from plait.contract.step import Gemm, Move, Step, list_gemms, list_moves
from plait.dtype import width_bytes
from plait.planner.cost import Cost, Kind, join
from plait.planner.hardware import Constant
from plait.planner.laws import Estimate, estimate_gemm, estimate_quantize
from plait.planner.step.circumstance import Circumstance, build_cost
from plait.planner.step.overlap import Gain, Overlapped, Pass, time_pass
from plait.schedule.work import Operation
from plait.sharding import Kind as Movement
from plait.sharding import Partial, Replicate, derive_transition

_DISABLED = OverlapConfig(policy="disabled")

_PASSES = {
    ("column", "forward"): Operation.COLUMN_FORWARD,
    ("column", "backward"): Operation.COLUMN_BACKWARD,
    ("row", "forward"): Operation.ROW_FORWARD,
    ("row", "backward"): Operation.ROW_BACKWARD,
}

Direction = Literal["forward", "backward"]


def build_linear(op: Op, direction: Direction, where: Circumstance, *, is_head: bool = False) -> Cost:
    """One pass of a linear, or of the linears that read the same input, which are multiplied as one.

    Every collective of the contract is in it once: beside the GEMMs if it is of the linear's boundary, else after them.
    """
    dtype = where.plan.precision.compute if is_head else where.gemm_dtype
    steps: tuple[Step, ...] = getattr(op, direction)
    gemms = {gemm.what: gemm for gemm in _merge(list_gemms(steps))}
    estimates = {what: _time(gemm, where, dtype) for what, gemm in gemms.items()}
    beside = {move.tensor: move for move in list_moves(steps) if move.tensor in _BESIDE}
    moves = {name: where.estimate_move(m.collective, wire_share=_share(m, where, dtype)) for name, m in beside.items()}
    timed = _overlap(op, direction, where, (gemms, estimates, moves, dtype))
    compute_s = sum(estimate.seconds for estimate in estimates.values())
    rest = [move for move in list_moves(steps) if move.tensor not in _BESIDE]
    return join(
        op.name,
        [
            *_build_quantise(op, direction, where, dtype),
            *(_build_gemm(gemm, estimates[what], where, dtype) for what, gemm in gemms.items()),
            *([_build_exposed(beside, moves, compute_s, timed, where.hardware.overlap.gain)] if moves else []),
            *where.build_moves(rest),
        ],
        note=direction,
    )


_BESIDE = ("x", "dx", "y", "dy")
"""What moves at a linear's boundary; gradients of replicated parameters are summed after it."""

_Timed = tuple[dict[str, Gemm], dict[str, Estimate], dict[str, Estimate], str]


def _overlap(op: Op, direction: Direction, where: Circumstance, timed: _Timed) -> Overlapped:
    gemms, _, moves, dtype = timed
    setting, hardware = where.contract.setting, where.hardware
    is_row = _is_row(op)
    entry = derive_transition(setting.activation, Replicate())
    leave = derive_transition(Partial(), setting.activation)
    width = (op.outputs if is_row else op.inputs)[0].layout.shape[1]
    row_bytes = width * width_bytes(setting.sum_dtype)
    memory = hardware.memory
    one = Pass(
        _PASSES["row" if is_row else "column", direction],
        leave if is_row else entry,
        setting.num_tokens,
        setting.tp,
        {what: partial(_seconds, gemm, where, dtype) for what, gemm in gemms.items()},
        {name: estimate.seconds for name, estimate in moves.items()},
        where.latency_s,
        row_bytes / (memory.bytes_per_s.value * memory.efficiency.value),
    )
    gain = Gain(hardware.overlap.gain.value, hardware.overlap.least_gemm_s.value)
    return time_pass(one, choose_policy(op, where.plan.overlap), gain)


def choose_policy(op: Op, overlap: OverlapConfig) -> OverlapConfig:
    """What holds for this linear."""
    return _DISABLED if overlap.policy == "mlp_only" and ".mlp." not in op.name else overlap


def _is_row(op: Op) -> bool:
    return len(op.parameters) > 0 and op.parameters[0].ownership.dim == 1


def _merge(gemms: Sequence[Gemm]) -> list[Gemm]:
    """Linears of a group read the same input and are one GEMM: wider forward, longer for dgrad, taller for wgrad."""
    merged: dict[str, Gemm] = {}
    for gemm in gemms:
        if (before := merged.get(gemm.what)) is None:
            merged[gemm.what] = gemm
            continue
        m, k, n = before.m, before.k, before.n
        match gemm.what:
            case "forward":
                n += gemm.n
            case "dgrad":
                k += gemm.k
            case _:
                m += gemm.m
        merged[gemm.what] = Gemm(before.name, before.what, m, k, n)
    return list(merged.values())


def _time(gemm: Gemm, where: Circumstance, dtype: str) -> Estimate:
    return estimate_gemm(where.hardware, gemm.m, gemm.n, gemm.k, dtype=dtype)


def _seconds(gemm: Gemm, where: Circumstance, dtype: str, num_rows: int) -> float:
    """So many tokens of it: rows of forward and dgrad, but what wgrad sums over."""
    is_wgrad = gemm.what == "wgrad"
    m, k = (gemm.m, num_rows) if is_wgrad else (num_rows, gemm.k)
    return estimate_gemm(where.hardware, m, gemm.n, k, dtype=dtype).seconds


def _share(move: Move, where: Circumstance, dtype: str) -> float:
    """Quantized operands are gathered as they are; sums are not, nor rows whose scales span all ranks' columns."""
    is_operand = move.collective.kind is Movement.ALL_GATHER
    return 0.5 if dtype == "float8" and is_operand and where.plan.quantization != "fp8_rowwise" else 1.0


def _build_gemm(gemm: Gemm, estimate: Estimate, where: Circumstance, dtype: str) -> Cost:
    cost = build_cost(gemm.what, Kind.GEMM, estimate, note=f"[{gemm.m}, {gemm.k}] @ [{gemm.k}, {gemm.n}] {dtype}")
    peak = where.hardware.peak(dtype).value
    return cost.with_efficiency(gemm.flops / (estimate.seconds * peak) if estimate.seconds else 0.0)


def _build_quantise(op: Op, direction: Direction, where: Circumstance, dtype: str) -> list[Cost]:
    """The operand that is not a weight, with the copy that wgrad contracts; weights are cast once a step."""
    if dtype != "float8":
        return []
    tensor = op.inputs[0] if direction == "forward" else op.outputs[0]
    rank = where.contract.setting.rank
    numel = prod(tensor.layout.local_shape(rank))
    if direction == "backward":
        numel = sum(prod(each.layout.local_shape(rank)) for each in op.outputs)
    recipe = where.plan.quantization
    passes = 2 if recipe == "fp8_rowwise" else 1
    one = estimate_quantize(where.hardware, numel, delayed=recipe == "fp8_delayedscaling", transposed=True)
    return [join("quantise", [build_cost("quantise", Kind.MEMORY_BOUND, one)], times=passes)]


def _build_exposed(
    moves: dict[str, Move], estimates: dict[str, Estimate], compute_s: float, timed: Overlapped, gain: Constant
) -> Cost:
    """What communication adds to the GEMMs, and what they hide of it: more or less, as the gain is uncertain."""
    total_s = sum(estimate.seconds for estimate in estimates.values())
    exposed_s = max(0.0, timed.seconds - compute_s)
    hidden_s = max(0.0, total_s - exposed_s)
    uncertainty = 1 + (sum(e.seconds * e.uncertainty for e in estimates.values()) / total_s if total_s else 0.0)
    least, most = (gain.low or gain.value) / gain.value, (gain.high or gain.value) / gain.value
    constants = [name for estimate in estimates.values() for name in estimate.constants]
    return Cost(
        " + ".join(f"{move.collective.kind} {name}" for name, move in moves.items()),
        Kind.COMMUNICATION,
        exposed_s,
        low_s=max(0.0, exposed_s - (most - 1) * hidden_s) / uncertainty,
        high_s=(exposed_s + (1 - least) * hidden_s) * uncertainty,
        hidden_s=hidden_s,
        constants=tuple(dict.fromkeys([*constants, *([gain.name] if hidden_s else [])])),
        note=timed.schedule,
        collectives=tuple(move.collective for move in moves.values()),
    )
