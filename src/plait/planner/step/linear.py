"""The linears of a contract: GEMMs, quantise passes and collectives of one operation, forward and backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

from plait.config.overlap import OverlapConfig
from plait.contract.op import Op
from plait.contract.step import Gemm, Move, Step, list_gemms, list_moves
from plait.dtype import width_bytes
from plait.planner.assumed import EXPOSED_LATENCIES
from plait.planner.cost import Cost, Kind, join
from plait.planner.hardware import Constant
from plait.planner.laws import Estimate, estimate_gemm, estimate_quantize
from plait.planner.step.circumstance import Circumstance, build_cost
from plait.planner.step.overlap import Overlapped, Pass, derive_gain, time_pass
from plait.schedule.work import Operation
from plait.sharding import Partial, Replicate, derive_transition

_DISABLED = OverlapConfig(policy="disabled")

_PASSES = {
    ("column", "forward"): Operation.COLUMN_FORWARD,
    ("column", "backward"): Operation.COLUMN_BACKWARD,
    ("row", "forward"): Operation.ROW_FORWARD,
    ("row", "backward"): Operation.ROW_BACKWARD,
}

Direction = Literal["forward", "backward"]

_MANY = 1024
"""Elements in a whole number of blocks."""


@dataclass(frozen=True, slots=True)
class LinearPass:
    """One pass through a linear, or through linears that read the same input, which are multiplied as one.

    Attributes:
        dtype: of the operands.
        gemms: by what they compute (forward, dgrad, wgrad), each with its law's answer.
        moves: by tensor, the collectives of the linear's boundary, each alone.
        later: collectives before or after it: largest magnitudes, gradients of replicated parameters.
        together: both beside each other, as the simulated clock sees them.
        overlapped: what that takes under the plan's policy.
    """

    dtype: str
    gemms: Mapping[str, tuple[Gemm, Estimate]]
    moves: Mapping[str, tuple[Move, Estimate]]
    later: tuple[Move, ...]
    together: Pass
    overlapped: Overlapped


_BESIDE = ("x", "dx", "y", "dy")
"""What moves at a linear's boundary."""


def build_linear(op: Op, direction: Direction, where: Circumstance, *, is_head: bool = False) -> Cost:
    """What a pass costs; every collective of the contract is in it once, beside the GEMMs or after them."""
    one = build_pass(op, direction, where, is_head=is_head)
    return join(
        op.name,
        [
            *_build_quantise(op, direction, where, one.dtype),
            *(_build_gemm(gemm, estimate, where, one.dtype) for gemm, estimate in one.gemms.values()),
            *([_build_exposed(one, where.hardware.overlap.gain)] if one.moves else []),
            *where.build_moves(one.later),
        ],
        note=direction,
    )


def build_pass(op: Op, direction: Direction, where: Circumstance, *, is_head: bool = False) -> LinearPass:
    """The GEMMs and collectives of the contract, timed alone and together."""
    dtype = where.plan.precision.compute if is_head else where.gemm_dtype
    steps: tuple[Step, ...] = getattr(op, direction)
    gemms = {gemm.what: (gemm, _time(gemm, where, dtype)) for gemm in _merge(list_gemms(steps))}
    issued = list_moves(steps)
    moves = {move.tensor: (move, where.estimate_move(move.collective)) for move in issued if _is_beside(move)}
    setting, is_row = where.contract.setting, op.parameters[0].ownership.dim == 1
    width = (op.outputs if is_row else op.inputs)[0].layout.shape[1]
    together = Pass(
        _PASSES["row" if is_row else "column", direction],
        derive_transition(Partial(), setting.activation)
        if is_row
        else derive_transition(setting.activation, Replicate()),
        setting.num_tokens,
        setting.tp,
        {what: partial(_seconds, gemm, where, dtype) for what, (gemm, _) in gemms.items()},
        {name: estimate.seconds for name, (_, estimate) in moves.items()},
        where.latency_s,
        width * width_bytes(setting.sum_dtype) / where.hardware.memory.streamed_bytes_per_s,
    )
    overlapped = time_pass(together, choose_policy(op, where.plan.overlap), derive_gain(where.hardware))
    later = tuple(move for move in issued if not _is_beside(move))
    return LinearPass(dtype, gemms, moves, later, together, overlapped)


def choose_policy(op: Op, overlap: OverlapConfig) -> OverlapConfig:
    """What holds for this linear."""
    return _DISABLED if overlap.policy == "mlp_only" and ".mlp." not in op.name else overlap


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


def _is_beside(move: Move) -> bool:
    """Whether it can move while a GEMM runs: not what ranks that share heads, or scales, agree on before."""
    return move.tensor in _BESIDE and move.collective.axis == "tp"


def _build_gemm(gemm: Gemm, estimate: Estimate, where: Circumstance, dtype: str) -> Cost:
    reached = gemm.flops / (estimate.seconds * where.hardware.peak(dtype).value) if estimate.seconds else 0.0
    note = f"[{gemm.m}, {gemm.k}] @ [{gemm.k}, {gemm.n}] {dtype}"
    return build_cost(gemm.what, Kind.GEMM, estimate, note=note, efficiency=reached)


def _build_quantise(op: Op, direction: Direction, where: Circumstance, dtype: str) -> list[Cost]:
    """The operand that is not a weight, with the copy that wgrad contracts; weights are cast once a step."""
    recipe = where.plan.recipe
    if recipe is None or dtype != where.gemm_dtype:
        return []
    tensor = op.inputs[0] if direction == "forward" else op.outputs[0]
    rank = where.contract.setting.rank
    numel = prod(tensor.layout.local_shape(rank))
    if direction == "backward":
        numel = sum(prod(each.layout.local_shape(rank)) for each in op.outputs)
    passes = 2 if where.plan.quantization == "fp8_rowwise" else 1
    operand = recipe.input if direction == "forward" else recipe.gradient
    one = estimate_quantize(
        where.hardware, numel, is_scale_known=not operand.needs_amax, transposed=True,
        element_bytes=operand.row_bytes(_MANY) / _MANY,
    )  # fmt: skip
    return [join("quantise", [build_cost("quantise", Kind.MEMORY_BOUND, one)], times=passes)]


def _build_exposed(one: LinearPass, gain: Constant) -> Cost:
    """What communication adds to the GEMMs, and what they hide of it: more or less, as the gain is uncertain."""
    estimates = [estimate for _, estimate in one.moves.values()]
    total_s = sum(estimate.seconds for estimate in estimates)
    exposed_s = max(0.0, one.overlapped.seconds - one.together.compute_s)
    hidden_s = max(0.0, total_s - exposed_s)
    uncertainty = 1 + (sum(e.seconds * e.uncertainty for e in estimates) / total_s if total_s else 0.0)
    least, most = (gain.low or gain.value) / gain.value, (gain.high or gain.value) / gain.value
    constants = [name for estimate in estimates for name in estimate.constants]
    return Cost(
        " + ".join(f"{move.collective.kind} {name}" for name, (move, _) in one.moves.items()),
        Kind.COMMUNICATION,
        exposed_s,
        low_s=max(0.0, exposed_s - (most - 1) * hidden_s) / uncertainty,
        high_s=(exposed_s + (1 - least) * hidden_s) * uncertainty,
        hidden_s=hidden_s,
        constants=tuple(dict.fromkeys([*constants, *((gain.name, EXPOSED_LATENCIES.name) if hidden_s else ())])),
        note=one.overlapped.schedule,
        collectives=tuple(move.collective for move, _ in one.moves.values()),
    )
