"""Which rank the others wait for. All ranks take as long for a step; a slow one is busy while the others wait."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from plait.comm import trace
from plait.comm.agree import share
from plait.comm.mesh import Mesh
from plait.units import format_seconds

_SLOW = 1.5
"""How many times as long as the others a rank is busy that is called slow; uneven shards differ by less."""
_NOTABLE_S = 0.5
"""How much longer, over all steps that were measured: of short steps the difference is chance."""


@dataclass(frozen=True)
class RankPace:
    """One rank over some steps, on average.

    Attributes:
        busy_s: of a step, in which it did not wait for other ranks.
    """

    name: str
    busy_s: float
    wait_s: float


@dataclass(frozen=True)
class Pace:
    """All ranks over some steps, by rank."""

    num_steps: int
    ranks: tuple[RankPace, ...]

    def list_slow(self) -> list[int]:
        """The ranks that the others wait for."""
        ordered = sorted(pace.busy_s for pace in self.ranks)
        return [rank for rank, pace in enumerate(self.ranks) if self._is_slow(pace.busy_s, ordered)]

    def describe_slow(self) -> str:
        """Which ranks those are, and by how much; or that there is none any more."""
        slow = self.list_slow()
        if not slow:
            return "no rank is slow any more"
        named = ", ".join(f"{self.ranks[rank].name} {format_seconds(self.ranks[rank].busy_s)}" for rank in slow)
        others = [pace for rank, pace in enumerate(self.ranks) if rank not in slow]
        busy_s, wait_s = median(pace.busy_s for pace in others), median(pace.wait_s for pace in others)
        return (
            f"slow: {named} busy of a step, the other ranks {format_seconds(busy_s)}; they wait for "
            f"{format_seconds(wait_s)}"
        )

    def to_record(self) -> dict[str, float | int]:
        """For the metrics."""
        busy_s = [pace.busy_s for pace in self.ranks]
        return {"busy_s_median": median(busy_s), "busy_s_most": max(busy_s), "busiest_rank": busy_s.index(max(busy_s))}

    def _is_slow(self, busy_s: float, ordered: Sequence[float]) -> bool:
        usual_s = _find_median_without(ordered, bisect_left(ordered, busy_s))
        return busy_s > _SLOW * usual_s and (busy_s - usual_s) * self.num_steps > _NOTABLE_S


def _find_median_without(ordered: Sequence[float], place: int) -> float:
    """Of all but the number at one place; infinite where there is no other. Every rank asks it of every rank."""
    last = len(ordered) - 2
    if last < 0:
        return float("inf")
    middle = (last // 2, (last + 1) // 2)
    return sum(ordered[each + (each >= place)] for each in middle) / 2


class PaceMeter:
    """Measures the steps of this rank, and every `every` steps compares them with those of the others."""

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._mesh, self._every = mesh, every
        # What a CUDA device waits is not seen from its host.
        self._is_on = every > 0 and mesh.shape.world_size > 1 and mesh.device.type == "cpu"
        self._num_steps, self._elapsed_s, self._wait_s = 0, 0.0, 0.0

    def begin(self) -> tuple[float, float]:
        """The time at the start of a step, and how long this rank has waited so far."""
        return time.perf_counter(), trace.waited_s()

    def end(self, begun: tuple[float, float]) -> float:
        """How long a step took."""
        elapsed_s = time.perf_counter() - begun[0]
        self._num_steps += 1
        self._elapsed_s += elapsed_s
        self._wait_s += trace.waited_s() - begun[1]
        return elapsed_s

    def compare(self) -> Pace | None:
        """The pace of all ranks when it is time for it, on every rank; every rank has to ask after each step."""
        if not self._is_on or self._num_steps < self._every:
            return None
        count, busy_s = self._num_steps, max(0.0, self._elapsed_s - self._wait_s)
        own = RankPace(trace.identity(), busy_s / count, self._wait_s / count)
        self._num_steps, self._elapsed_s, self._wait_s = 0, 0.0, 0.0
        with trace.aside():
            return Pace(count, tuple(share(own, self._mesh)))


class SlowRanks:
    """Says which ranks are slow when that changes."""

    def __init__(self) -> None:
        self._known: Sequence[int] = ()

    def describe_change(self, pace: Pace) -> str | None:
        """What is new; None where nothing is."""
        slow = pace.list_slow()
        is_new, self._known = slow != list(self._known), slow
        return pace.describe_slow() if is_new else None
