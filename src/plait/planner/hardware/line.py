"""Latency-bandwidth lines of a collective: of each degree measured, and between those."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A collective of one degree takes the least of `latency_s + wire bytes / bytes_per_s` over its pieces.

    Two pieces stand for the library's protocols: one of low latency, one of high bandwidth.
    """

    pieces: tuple[tuple[float, float], ...]
    uncertainty: float
    constants: tuple[str, ...]

    def seconds(self, wire_bytes: float) -> float:
        """How long so many bytes out of every rank's port take."""
        return min(latency_s + wire_bytes / bytes_per_s for latency_s, bytes_per_s in self.pieces)


def derive_lines(measured: Mapping[int, Line], largest: int, multicast_from: int | None) -> dict[int, Line]:
    """Lines for every degree up to `largest`.

    Between measured degrees latency and bandwidth lie on a straight line; beyond the last they stay. Degrees at which
    the switch adds (`multicast_from` and above) and those at which ranks add are not mixed.
    """
    lines = {}
    for degree in range(2, largest + 1):
        switch = multicast_from is not None and degree >= multicast_from
        alike = [
            known for known in sorted(measured) if (multicast_from is not None and known >= multicast_from) == switch
        ]
        lines[degree] = _derive_line(measured, alike or sorted(measured), degree)
    return lines


_GUESS = 1.5
"""How much surer a measured degree is than one between or beyond those."""


def _derive_line(measured: Mapping[int, Line], known: list[int], degree: int) -> Line:
    if degree in known:
        return measured[degree]
    below = max((other for other in known if other < degree), default=known[0])
    above = min((other for other in known if other > degree), default=known[-1])
    low, high = measured[below], measured[above]
    share = (degree - below) / (above - below) if above != below else 0.0
    count = max(len(low.pieces), len(high.pieces))
    pieces = tuple(
        (_between(low.pieces, high.pieces, index, 0, share), _between(low.pieces, high.pieces, index, 1, share))
        for index in range(count)
    )
    names = tuple(dict.fromkeys(low.constants + high.constants))
    return Line(pieces, _GUESS * max(low.uncertainty, high.uncertainty), names)


def _between(
    low: tuple[tuple[float, float], ...], high: tuple[tuple[float, float], ...], index: int, part: int, share: float
) -> float:
    start, end = low[min(index, len(low) - 1)][part], high[min(index, len(high) - 1)][part]
    return start if start == end else start + share * (end - start)
