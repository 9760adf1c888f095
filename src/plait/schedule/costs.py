"""What the steps of a program take on one machine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from plait.schedule.step import Add, Flow, Multiply
from plait.sharding import Kind


@dataclass(frozen=True)
class Costs:
    """A machine and a linear, as the simulated clock sees them.

    Attributes:
        gemm_s: per GEMM, how long so many of its rows take.
        row_bytes: per tensor, what a row of it is on its way: of sums, in the dtype that carries them.
        latency_s: from the last byte sent to the last byte there.
        bytes_per_s: of a link, in either direction.
        add_s: a sum, however small.
        add_row_s: adding one row to another.
        step_s: what the host spends on every receive, send and wait.
        collect_s: per tensor, the library's collective as a whole.
        contention: the share of the core that moving takes from the GEMMs at both ends: 0 beside an accelerator, 1
            where the core does nothing else while bytes move.
    """

    gemm_s: Mapping[str, Callable[[int], float]]
    row_bytes: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.0
    bytes_per_s: float = inf
    add_s: float = 0.0
    add_row_s: float = 0.0
    step_s: float = 0.0
    collect_s: Mapping[str, float] = field(default_factory=dict)
    contention: float = 0.0

    def seconds_of(self, step: Multiply | Add) -> float:
        """How long a rank computes, undisturbed."""
        if isinstance(step, Multiply):
            return self.gemm_s[step.gemm](len(step.rows))
        return self.add_s + self.add_row_s * len(step.piece.rows) * (len(step.ranks) - 1)


def estimate_collective_s(flow: Flow, row_bytes: float, *, latency_s: float, bytes_per_s: float) -> float:
    """A library's collective that moves no more than it must: a latency, and every rank's share over its link."""
    passes = 2 if flow.kind is Kind.ALL_REDUCE else 1
    return latency_s + passes * (flow.split.size - min(flow.split.lengths)) * row_bytes / bytes_per_s
