"""Bars of a timeline, measured, simulated or predicted: what each rank did when, on tracks side by side."""

from dataclasses import dataclass
from typing import Literal

BarTrack = Literal["compute", "send", "recv"]
TRACKS: tuple[BarTrack, ...] = ("compute", "send", "recv")


@dataclass(frozen=True)
class Bar:
    """Something that took time on one track of one rank.

    Attributes:
        kind: forward, dgrad, wgrad, add or other for computing; gather, reduce, collective or wait for moving.
    """

    rank: int
    track: BarTrack
    kind: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Chart:
    """One run as bars, from time 0."""

    title: str
    bars: tuple[Bar, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks that anything is known of."""
        return 1 + max((bar.rank for bar in self.bars), default=-1)

    @property
    def duration_s(self) -> float:
        """When the last bar ends."""
        return max((bar.end_s for bar in self.bars), default=0.0)
