"""Interleaved rounds: every variant once in each, so that what else the machine does falls on all alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from plait.comm import collectives, trace
from plait.comm.mesh import Axis

WARM_UP_ROUNDS = 2
"""In the first schedules are chosen, in the second buffers are used again for the first time."""


def warm_up(steps: Mapping[str, Callable[[], None]], axis: Axis) -> None:
    """Run every step until it runs as it always will."""
    for _ in range(WARM_UP_ROUNDS):
        for step in steps.values():
            meet(axis)
            step()


def time_rounds(steps: Mapping[str, Callable[[], None]], rounds: int, axis: Axis) -> dict[str, list[float]]:
    """Seconds of every step in every round, those of the slowest rank; all ranks start each step together."""
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            meet(axis)
            start_s = perf_counter()
            step()
            times_s[name].append(find_most(perf_counter() - start_s, axis))
    return times_s


def meet(axis: Axis) -> None:
    """Return when every rank has come."""
    find_most(0.0, axis)


def find_most(value: float, axis: Axis) -> float:
    """The most of any rank, in no trace."""
    with trace.aside():
        return float(collectives.all_reduce(torch.tensor([value], dtype=torch.float64), axis, op="max", label="bench"))


@dataclass(frozen=True)
class Spread:
    """A number that was measured in every round.

    Attributes:
        low: a quarter of the rounds is below.
        high: a quarter of the rounds is above.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """That of the values of all rounds."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def to_json(self) -> dict[str, float]:
        """For files and programs."""
        return {"median": self.median, "low": self.low, "high": self.high}


def find_ratio(one: Sequence[float], other: Sequence[float]) -> Spread:
    """`one / other`: the ratio of their medians, and between which quarters it lies inside a round."""
    inside = Spread.of([a / b for a, b in zip(one, other, strict=True)])
    return Spread(statistics.median(one) / statistics.median(other), inside.low, inside.high)
