"""Whether a GEMM fills the tiles in which a GPU multiplies.

A tile of the output is 128 x 256, and rows of the operands are read in pieces of 128 bytes, 64 elements of bfloat16. A
shard narrower than that wastes part of every tile, however fast the links are.
"""

from collections.abc import Iterable
from itertools import groupby
from math import ceil
from typing import NamedTuple

from plait.contract.step import Gemm

TILE = (128, 256)
UNIT = 64


class TileProblem(NamedTuple):
    """A dim of a GEMM that wastes part of its tiles."""

    size: int
    why: str
    what: str
    """Forward, dgrad or wgrad."""
    dim: str


def list_tile_problems(gemm: Gemm) -> list[TileProblem]:
    """What keeps `gemm` from filling tiles; tokens may be any number once they fill one."""
    narrow, wide = sorted((("m", gemm.m), ("n", gemm.n)), key=lambda dim: dim[1])
    edges = zip((narrow, wide), sorted(TILE), strict=True)
    problems = [
        TileProblem(size, f"is below the {edge} of a tile", gemm.what, dim)
        for (dim, size), edge in edges
        if size < edge
    ]
    widths = (("m", gemm.m), ("n", gemm.n)) if gemm.what == "wgrad" else (("k", gemm.k), ("n", gemm.n))
    problems += [
        TileProblem(size, f"is not a multiple of {UNIT}", gemm.what, dim) for dim, size in widths if size % UNIT
    ]
    return problems


def summarize_tile_problems(problems: Iterable[TileProblem]) -> list[str]:
    """`96 is below the 128 of a tile (forward n, dgrad k)`: each size and fault once."""
    grouped = groupby(sorted(problems, key=lambda problem: problem[:2]), key=lambda problem: problem[:2])
    return [
        f"{size} {why} ({', '.join(dict.fromkeys(f'{each.what} {each.dim}' for each in same))})"
        for (size, why), same in grouped
    ]


def derive_tile_fill(gemm: Gemm) -> float:
    """Share of the output tiles that is output, in the better of their two orientations."""
    covered = min(ceil(gemm.m / rows) * rows * ceil(gemm.n / columns) * columns for rows, columns in (TILE, TILE[::-1]))
    return gemm.m * gemm.n / covered if covered else 0.0
