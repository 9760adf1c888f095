from collections import Counter
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ShardingError
from plait.sharding import (
    Interval,
    Invariant,
    Ownership,
    Shard,
    Split,
    build_head_splits,
    build_split,
    build_token_split,
)
from tests.support.strategies import MAX_DEGREE, Heads, heads, splits

NAMED_CASES = [
    ("8 heads over 3", 8, 3, 1, (3, 3, 2)),
    ("8 heads of width 16 over 3", 128, 3, 16, (48, 48, 32)),
    ("ffn 2816 over 3", 2816, 3, 1, (939, 939, 938)),
    ("vocabulary 32,003 over 2", 32_003, 2, 1, (16_002, 16_001)),
    ("7 tokens over 2", 7, 2, 1, (4, 3)),
    ("2 tokens over 4", 2, 4, 1, (1, 1, 0, 0)),
    ("even", 4096, 8, 1, (512,) * 8),
]


@pytest.mark.parametrize(
    ("size", "degree", "unit", "lengths"), [c[1:] for c in NAMED_CASES], ids=[c[0] for c in NAMED_CASES]
)
def test_uneven_sizes_are_cut_exactly(size: int, degree: int, unit: int, lengths: tuple[int, ...]) -> None:
    """FIELD 3.24 and 3.25: no padding; the lengths add up to the true size."""
    split = build_split(size, degree, unit)
    assert split.lengths == lengths
    assert sum(split.lengths) == size


@given(split=splits())
def test_every_index_is_owned_by_exactly_one_rank(split: Split) -> None:
    owned = [index for interval in split.intervals for index in range(interval.start, interval.stop)]
    assert owned == list(range(split.size))


@given(units=st.integers(0, 60), unit=st.integers(1, 7), degree=st.integers(1, MAX_DEGREE))
def test_cuts_fall_between_units_and_differ_by_at_most_one_unit(units: int, unit: int, degree: int) -> None:
    split = build_split(units * unit, degree, unit)
    assert all(length % unit == 0 for length in split.lengths)
    assert max(split.lengths) - min(split.lengths) <= unit
    assert list(split.lengths) == sorted(split.lengths, reverse=True)
    assert split.longest == split.lengths[0]


@given(num_tokens=st.integers(0, 300), unit=st.sampled_from([1, 16, 32]), degree=st.integers(1, MAX_DEGREE))
def test_tokens_are_cut_in_units_or_where_they_form_none_one_by_one(num_tokens: int, unit: int, degree: int) -> None:
    """Inference has any number of tokens; only what backward reads is quantized in blocks of them."""
    is_whole = num_tokens % unit == 0
    split = build_token_split(num_tokens, degree, unit)
    assert split == build_split(num_tokens, degree, unit if is_whole else 1)
    assert (split.find_torn(unit) is None) == is_whole


@given(split=splits())
def test_an_even_split_is_one_where_all_lengths_agree(split: Split) -> None:
    assert split.is_even == (len(set(split.lengths)) == 1)
    assert not split.is_replicated


def test_small_splits_reshard_there_and_back_exhaustively() -> None:
    """FIELD 3.26: every pair of degrees for every small size; each rank reads just the intersections it needs."""
    for size, source, target in product(range(13), range(1, 7), range(1, 7)):
        value = list(range(100, 100 + size))
        before, after = build_split(size, source), build_split(size, target)
        shards = [value[part.start : part.stop] for part in before.intervals]
        moved = _reshard(shards, before, after)
        assert moved == [value[part.start : part.stop] for part in after.intervals], (size, source, target)
        assert _reshard(moved, after, before) == shards, (size, source, target)


def _reshard(shards: list[list[int]], before: Split, after: Split) -> list[list[int]]:
    moved: list[list[int]] = [[] for _ in after.intervals]
    for (rank, wanted), (shard, held) in product(
        enumerate(after.intervals), zip(shards, before.intervals, strict=True)
    ):
        common = wanted.intersect(held)
        moved[rank] += shard[common.start - held.start : common.stop - held.start] if len(common) else []
    return moved


@given(a=st.tuples(st.integers(0, 20), st.integers(0, 20)), b=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_an_intersection_holds_the_indices_of_both(a: tuple[int, int], b: tuple[int, int]) -> None:
    first, second = Interval(*sorted(a)), Interval(*sorted(b))
    common = first.intersect(second)
    assert set(_indices(common)) == set(_indices(first)) & set(_indices(second))
    assert first.start <= common.start <= common.stop <= first.stop


def _indices(interval: Interval) -> range:
    return range(interval.start, interval.stop)


@pytest.mark.parametrize(
    ("size", "degree", "unit", "message"),
    [
        (10, 2, 4, "10 elements cannot be cut over 2 ranks in whole units of 4"),
        (10, 0, 1, "over 0 ranks"),
        (-1, 2, 1, "-1 elements"),
        (10, 2, 0, "units of 0"),
    ],
)
def test_sizes_that_are_not_whole_units_are_refused(size: int, degree: int, unit: int, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        build_split(size, degree, unit)


@pytest.mark.parametrize(
    ("size", "edges"),
    [
        (6, [(0, 3), (4, 6)]),
        (6, [(0, 3), (2, 6)]),
        (6, [(0, 3), (3, 5)]),
        (6, [(3, 6), (0, 3)]),
        (6, [(0, 3), (3, 6), (0, 3)]),
        (6, []),
    ],
    ids=["gap", "overlap", "too short", "out of order", "replicas apart", "none"],
)
def test_intervals_that_do_not_cover_exactly_once_are_refused(size: int, edges: list[tuple[int, int]]) -> None:
    with pytest.raises(ShardingError, match="do not cover 0:6 exactly once"):
        Split(size, tuple(Interval(*edge) for edge in edges))


def test_a_reversed_interval_is_refused_with_its_values() -> None:
    with pytest.raises(ShardingError, match=r"interval \[5, 3\) is not"):
        Interval(5, 3)


def _ownerships(shape: Heads) -> list[Ownership]:
    cut = build_head_splits(shape.num_heads, shape.num_kv_heads, shape.head_width, shape.degree)
    width = 6
    return [
        Ownership("wq.weight", (cut.query.size, width), 0, cut.query),
        Ownership("wk.weight", (cut.kv.size, width), 0, cut.kv, "tp/kv" if cut.kv.is_replicated else None),
        Ownership("wo.weight", (width, cut.query.size), 1, cut.query),
        Ownership("norm.weight", (width,), reduced_over="tp"),
    ]


@given(shape=heads())
def test_every_element_of_every_parameter_is_counted_exactly_once(shape: Heads) -> None:
    """FIELD 3.11: the norm counts, and the checkpoint writes, replicated KV heads and norms once."""
    for ownership in _ownerships(shape):
        counted: Counter[tuple[int, ...]] = Counter()
        for rank in range(shape.degree):
            if ownership.is_counted_on(rank):
                counted.update(product(*map(_indices, ownership.intervals(rank))))
        assert set(counted.values()) <= {1}, (ownership.name, shape)
        assert len(counted) == prod(ownership.shape), (ownership.name, shape)


@given(shape=heads())
def test_local_shapes_are_the_global_shape_with_the_own_interval_put_in(shape: Heads) -> None:
    for ownership in _ownerships(shape):
        for rank in range(shape.degree):
            expected = list(ownership.shape)
            if ownership.dim is not None and ownership.split is not None:
                expected[ownership.dim] = ownership.split.lengths[rank]
            assert ownership.local_shape(rank) == tuple(expected)


def test_a_parameter_is_sharded_where_it_is_cut_and_invariant_where_it_is_not() -> None:
    assert Ownership("w", (4, 6), 1, build_split(6, 2)).placement == Shard(1)
    assert Ownership("w", (4, 6)).placement == Invariant()


def test_an_ownership_that_contradicts_its_shape_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"mlp.w_up.weight \[8, 4\]: dim 0 is cut as if it had 6"):
        Ownership("mlp.w_up.weight", (8, 4), 0, build_split(6, 2))
    with pytest.raises(ShardingError, match="must be given together"):
        Ownership("mlp.w_up.weight", (8, 4), 0)
