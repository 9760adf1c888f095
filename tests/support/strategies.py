"""Hypothesis strategies for splits, heads, states, works and schedules."""

from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st

from plait.schedule.program import build_program, list_methods
from plait.schedule.step import Method, Program
from plait.schedule.work import (
    Work,
    derive_column_backward,
    derive_column_forward,
    derive_row_backward,
    derive_row_forward,
)
from plait.sharding import Invariant, Partial, Placement, Replicate, Shard, Split, build_split, derive_transition

MAX_DEGREE = 9


@dataclass(frozen=True)
class Heads:
    """An attention shape and a degree that it can be cut over."""

    num_heads: int
    num_kv_heads: int
    head_width: int
    degree: int


@st.composite
def splits(draw: st.DrawFn, *, max_units: int = 40, max_unit: int = 5) -> Split:
    """Any split that `build_split` makes: even, uneven, with empty ranks, in units."""
    unit = draw(st.integers(1, max_unit))
    return build_split(unit * draw(st.integers(0, max_units)), draw(st.integers(1, MAX_DEGREE)), unit)


@st.composite
def heads(draw: st.DrawFn) -> Heads:
    """Grouped, multi-query and multi-head attention at any degree from 1 to the number of query heads."""
    num_kv_heads = draw(st.integers(1, 6))
    num_heads = num_kv_heads * draw(st.integers(1, 6))
    return Heads(num_heads, num_kv_heads, draw(st.sampled_from([1, 2, 8])), draw(st.integers(1, num_heads)))


def placements() -> st.SearchStrategy[Placement]:
    """Any state of a matrix."""
    return st.sampled_from([Invariant(), Replicate(), Partial(), Shard(0), Shard(1)])


ENTRIES = {True: derive_transition(Shard(0), Replicate()), False: derive_transition(Invariant(), Replicate())}
EXITS = {True: derive_transition(Partial(), Shard(0)), False: derive_transition(Partial(), Invariant())}
"""Boundaries of a region, with sequence parallelism and without."""


@st.composite
def works(draw: st.DrawFn, *, max_degree: int = 8, max_rows: int = 40, even: bool = False) -> tuple[Work, int]:
    """What any pass of any linear has to do, and among how many ranks; fewer rows than ranks and no rows included.

    Rows travel one by one or in units that stay together, of which there may be no whole number.
    """
    degree = draw(st.integers(1, max_degree))
    unit = draw(st.sampled_from([1, 1, 2, 3]))
    each = degree * unit
    num_rows = each * draw(st.integers(0, max_rows // each)) if even else draw(st.integers(0, max_rows))
    entry, exit = draw(st.sampled_from([(ENTRIES[mode], EXITS[mode]) for mode in (True, False)]))
    needs = draw(st.sampled_from([{}, {"needs_wgrad": False}, {"needs_dgrad": False}]))
    derive = draw(
        st.sampled_from(
            [
                lambda: derive_column_forward(entry, num_rows, degree, unit),
                lambda: derive_row_forward(exit, num_rows, degree, unit),
                lambda: derive_column_backward(entry, num_rows, degree, unit, **needs),
                lambda: derive_row_backward(exit, num_rows, degree, unit, **needs),
            ]
        )
    )
    return derive(), degree


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks for one work."""

    work: Work
    method: Method
    chunks: int
    programs: tuple[Program, ...]


def build_schedule(work: Work, degree: int, method: Method, chunks: int) -> Schedule:
    return Schedule(work, method, chunks, tuple(build_program(work, method, chunks, rank) for rank in range(degree)))


@st.composite
def schedules(
    draw: st.DrawFn, *, max_degree: int = 8, max_rows: int = 40, moves: bool = False, even: bool = False
) -> Schedule:
    """Any schedule there is; with `moves`, one that moves something piece by piece, with `even`, one of equal ranks."""
    work, degree = draw(works(max_degree=max_degree, max_rows=max_rows, even=even))
    methods = [method for method in list_methods(work) if not (moves and method is Method.NONE)]
    assume(methods)
    return build_schedule(work, degree, draw(st.sampled_from(methods)), draw(st.integers(1, 6)))
