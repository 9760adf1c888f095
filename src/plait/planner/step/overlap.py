"""A linear's pass with its collectives beside it: its schedule on the simulated clock, derated by what kernels reach.

    t = serial - min(gain * (serial - simulated), communication - 3 latencies)

The gain is one constant of the catalog, fitted on kernel contrasts. Three latencies of the links (`EXPOSED_LATENCIES`)
are never hidden, so that of a small collective nothing is; and nothing is gained where sums are to be hidden by GEMMs
that are too short (measured: slower than serial). Nothing else is tuned: what is simulated is the program that runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plait.config.overlap import OverlapConfig
from plait.planner.assumed import EXPOSED_LATENCIES
from plait.planner.hardware import Hardware
from plait.planner.step.clock import time_symmetric
from plait.schedule.costs import Costs
from plait.schedule.program import build_program, list_methods
from plait.schedule.step import Method
from plait.schedule.work import Operation, Work, derive_work
from plait.sharding import Kind, Transition

_FEW_RANKS = 4
"""With fewer ranks each owner's rows are cut in two, so that there are pieces enough to overlap."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass through a linear, as the clock needs it.

    Attributes:
        gemm_s: per GEMM (forward, dgrad, wgrad), how long so many tokens of it take.
        move_s: per tensor that moves, its collective as a whole.
        latency_s: of the fastest small message.
        add_row_s: adding a row to another.
    """

    operation: Operation
    transition: Transition
    num_rows: int
    degree: int
    gemm_s: Mapping[str, Callable[[int], float]]
    move_s: Mapping[str, float]
    latency_s: float
    add_row_s: float

    @property
    def work(self) -> Work:
        """What has to be computed and moved; rows are rounded up until every rank has as many."""
        rows = -(-self.num_rows // self.degree) * self.degree
        return derive_work(self.operation, self.transition, rows, self.degree)

    @property
    def compute_s(self) -> float:
        """All GEMMs, whole."""
        return sum(seconds(self.num_rows) for seconds in self.gemm_s.values())

    @property
    def serial_s(self) -> float:
        """One after the other."""
        return self.compute_s + sum(self.move_s.values())

    def derive_costs(self) -> Costs:
        """Links on which each tensor, sent whole and alone, takes as long as its collective."""
        row_s = {}
        for flow in self.work.flows:
            passes = 2 if flow.kind is Kind.ALL_REDUCE else 1
            rows = passes * flow.split.size * (self.degree - 1) / self.degree
            row_s[flow.tensor] = max(0.0, self.move_s[flow.tensor] - passes * self.latency_s) / rows
        return Costs(self.gemm_s, row_s, latency_s=self.latency_s, bytes_per_s=1.0, add_row_s=self.add_row_s)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """How long a pass takes, by which schedule.

    Attributes:
        simulated_s: what the schedule takes on the simulated clock.
        chunks: pieces of each rank's rows.
    """

    seconds: float
    simulated_s: float
    method: Method
    chunks: int = 1

    @property
    def schedule(self) -> str:
        """In words: `direct x2`."""
        return f"{self.method} x{self.chunks}" if self.chunks > 1 else str(self.method)


@dataclass(frozen=True, slots=True)
class Gain:
    """What real kernels reach of a schedule (`Overlap` of the catalog)."""

    share: float
    least_gemm_s: float


def derive_gain(hardware: Hardware) -> Gain:
    """That of a kind of device."""
    return Gain(hardware.overlap.gain.value, hardware.overlap.least_gemm_s.value)


def time_pass(one: Pass, overlap: OverlapConfig, gain: Gain) -> Overlapped:
    """The pass under a policy: `auto` and a free choice of method take the best, never a slower one than serial."""
    serial = Overlapped(one.serial_s, one.serial_s, Method.NONE)
    if overlap.policy == "disabled" or not one.move_s:
        return serial
    work = one.work
    allowed = [method for method in list_methods(work) if overlap.method in ("auto", method)]
    costs = one.derive_costs()
    ways = [
        _time_way(one, work, costs, method, _choose_chunks(one, method, overlap), gain)
        for method in allowed
        if _is_considered(method, overlap)
    ]
    if overlap.policy == "auto" or not ways:
        ways.append(serial)
    return min(ways, key=lambda way: way.seconds)


def _is_considered(method: Method, overlap: OverlapConfig) -> bool:
    """Left the choice, direct and bulk ones: on links that reach every rank at once a ring only adds hops."""
    return method is not Method.NONE and (overlap.method != "auto" or method in (Method.DIRECT, Method.BULK))


def _time_way(one: Pass, work: Work, costs: Costs, method: Method, chunks: int, gain: Gain) -> Overlapped:
    simulated_s = time_symmetric(build_program(work, method, chunks, one.degree // 2), costs)
    is_too_short = work.reduce is not None and one.compute_s < gain.least_gemm_s
    hidden_s = 0.0 if is_too_short else gain.share * (one.serial_s - simulated_s)
    most_s = max(0.0, sum(one.move_s.values()) - EXPOSED_LATENCIES.value * one.latency_s)
    return Overlapped(one.serial_s - min(hidden_s, most_s), simulated_s, method, chunks)


def _choose_chunks(one: Pass, method: Method, overlap: OverlapConfig) -> int:
    if method is Method.BULK:
        return 1
    if overlap.chunks != "auto":
        return overlap.chunks
    return 2 if one.degree < _FEW_RANKS else 1
