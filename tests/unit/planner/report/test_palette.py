"""Colours are told apart by everyone, on white and on black."""

from itertools import combinations, pairwise

import pytest

from plait.planner.cost import Kind
from plait.planner.prediction import MemoryPart
from plait.planner.report.palette import GROUPS, MEMORY, TIME, color_rank, color_text_on

Matrix = tuple[tuple[float, float, float], ...]

# Of linear RGB, as people see it who lack one kind of cones (Vienot, Brettel and Mollon, 1999).
SIGHTS: dict[str, Matrix] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deuteranopia": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}
_XYZ: Matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
_JUST_APART = 9.0
"""In CIE 1976; about 2.3 is a difference that is just seen side by side."""


def _apply(matrix: Matrix, color: list[float]) -> list[float]:
    return [sum(weight * channel for weight, channel in zip(row, color, strict=True)) for row in matrix]


def _see(color: str, sight: str) -> tuple[float, ...]:
    linear = _apply(SIGHTS[sight], [(channel / 255) ** 2.2 for channel in bytes.fromhex(color[1:])])
    whites = (0.9505, 1.0, 1.089)
    x, y, z = ((max(0.0, value) / white) ** (1 / 3) for value, white in zip(_apply(_XYZ, linear), whites, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _distance(first: str, second: str, sight: str) -> float:
    pairs = zip(_see(first, sight), _see(second, sight), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


@pytest.mark.parametrize("sight", SIGHTS)
def test_kinds_of_one_chart_are_told_apart(sight: str) -> None:
    for inks in (TIME.values(), MEMORY.values()):
        # Two that look alike differ by their hatching.
        alike = [
            (a.label, b.label, _distance(a.color, b.color, sight))
            for a, b in combinations(inks, 2)
            if a.pattern == b.pattern and _distance(a.color, b.color, sight) < _JUST_APART
        ]
        assert alike == []


@pytest.mark.parametrize("sight", SIGHTS)
def test_neighbouring_ranks_are_told_apart(sight: str) -> None:
    colors = [color_rank(rank, 8) for rank in range(8)]
    assert min(_distance(a, b, sight) for a, b in pairwise(colors)) > _JUST_APART


def test_every_kind_is_drawn_once() -> None:
    assert sorted(kind for _, kinds in GROUPS for kind in kinds) == sorted(Kind) == sorted(TIME)
    assert sorted(MEMORY) == sorted(MemoryPart)


def test_words_on_a_colour_are_read() -> None:
    assert color_text_on("#FFFFFF") == "#101010"
    assert color_text_on(color_rank(0, 8)) == "#FFFFFF"
    assert color_text_on(color_rank(7, 8)) == "#101010"
    assert color_rank(0, 1) == color_rank(0, 8)
