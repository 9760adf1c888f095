"""Hypothesis strategies for splits, heads and states."""

from dataclasses import dataclass

from hypothesis import strategies as st

from plait.sharding import Invariant, Partial, Placement, Replicate, Shard, Split, build_split

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
