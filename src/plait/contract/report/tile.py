"""Whether a GEMM fills the tiles in which a GPU multiplies.

A tile of the output is 128 x 256; rows of the operands are read in pieces of 128 bytes, 64 elements of bfloat16. A
shard narrower than that wastes part of each tile, whatever the links do.
"""

from math import ceil

from plait.contract.step import Gemm

TILE = (128, 256)
UNIT = 64


def list_tile_problems(gemm: Gemm) -> list[str]:
    """What keeps `gemm` from efficient tiles; empty where nothing does."""
    short, long = sorted(TILE)
    narrow, wide = sorted((("m", gemm.m), ("n", gemm.n)), key=lambda dim: dim[1])
    problems = []
    if narrow[1] < short:
        problems.append(f"{narrow[0]} = {narrow[1]} is below the {short} of a tile")
    if wide[1] < long:
        problems.append(f"{wide[0]} = {wide[1]} is below the {long} of a tile")
    for dim, size in (("m", gemm.m), ("k", gemm.k), ("n", gemm.n)):
        if size % UNIT:
            problems.append(f"{dim} = {size} is not a multiple of {UNIT}")
    return problems


def derive_tile_fill(gemm: Gemm) -> float:
    """Share of the output tiles that is output, in the better of their two orientations."""
    used = gemm.m * gemm.n
    covered = min(
        ceil(gemm.m / rows) * rows * ceil(gemm.n / columns) * columns for rows, columns in (TILE, tuple(reversed(TILE)))
    )
    return used / covered if covered else 0.0
