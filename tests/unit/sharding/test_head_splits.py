import pytest
from hypothesis import given

from plait.errors import ShardingError
from plait.sharding import HeadSplits, build_head_splits
from tests.support.strategies import Heads, heads


def _cut(shape: Heads) -> HeadSplits:
    return build_head_splits(shape.num_heads, shape.num_kv_heads, shape.head_width, shape.degree)


@given(shape=heads())
def test_every_query_head_sits_with_the_kv_head_it_reads(shape: Heads) -> None:
    """FIELD 3.22: heads are the unit, below one KV head it is replicated, and that is decided before anything runs."""
    cut, group = _cut(shape), shape.num_heads // shape.num_kv_heads
    for query, kv in zip(cut.query.intervals, cut.kv.intervals, strict=True):
        read = {index // shape.head_width // group for index in range(query.start, query.stop)}
        held = {index // shape.head_width for index in range(kv.start, kv.stop)}
        assert read == held, shape


@given(shape=heads())
def test_query_heads_are_whole_and_owned_once_and_no_rank_is_idle(shape: Heads) -> None:
    cut = _cut(shape)
    owned = [index for part in cut.query.intervals for index in range(part.start, part.stop)]
    assert owned == list(range(shape.num_heads * shape.head_width))
    assert all(length > 0 and length % shape.head_width == 0 for length in cut.query.lengths)


@given(shape=heads())
def test_kv_heads_are_replicated_exactly_when_there_are_fewer_than_ranks(shape: Heads) -> None:
    cut = _cut(shape)
    assert cut.kv.is_replicated == (shape.degree > shape.num_kv_heads)
    if cut.kv.is_replicated:
        assert len(cut.kv.replica_groups) == shape.num_kv_heads
        assert sorted(rank for ranks in cut.kv.replica_groups for rank in ranks) == list(range(shape.degree))
        for ranks in cut.kv.replica_groups:
            assert ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
            assert all(cut.kv.replicas(rank) == ranks for rank in ranks)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "degree", "query_heads", "kv_heads"),
    [
        (8, 8, 3, (3, 3, 2), (3, 3, 2)),
        (28, 4, 3, (14, 7, 7), (2, 1, 1)),
        (32, 8, 8, (4,) * 8, (1,) * 8),
        (16, 4, 6, (2, 2, 2, 2, 4, 4), (1,) * 6),
        (8, 1, 3, (3, 3, 2), (1, 1, 1)),
        (28, 4, 8, (4, 3) * 4, (1,) * 8),
    ],
    ids=[
        "8 heads over 3",
        "28 heads in 4 groups over 3",
        "a group a rank",
        "uneven subgroups",
        "one KV head",
        "28 heads on 8",
    ],
)
def test_named_head_counts_are_cut_as_stated(
    num_heads: int, num_kv_heads: int, degree: int, query_heads: tuple[int, ...], kv_heads: tuple[int, ...]
) -> None:
    """FIELD 3.23: uneven by whole KV groups, exact."""
    width = 16
    cut = build_head_splits(num_heads, num_kv_heads, width, degree)
    assert tuple(length // width for length in cut.query.lengths) == query_heads
    assert tuple(length // width for length in cut.kv.lengths) == kv_heads


def test_uneven_subgroups_are_consecutive_ranks() -> None:
    assert build_head_splits(16, 4, 8, 6).kv.replica_groups == ((0, 1), (2, 3), (4,), (5,))


def test_more_ranks_than_query_heads_is_refused_with_a_degree_that_works() -> None:
    with pytest.raises(ShardingError, match="8 query heads in 2 KV groups of 4 cannot be cut over 9 ranks") as error:
        build_head_splits(8, 2, 16, 9)
    assert error.value.hint == "use a degree of at most 8"
    assert min(build_head_splits(8, 2, 16, 8).query.lengths) > 0


def test_query_heads_that_form_no_groups_are_refused() -> None:
    with pytest.raises(ShardingError, match="10 query heads do not form groups over 4 KV heads"):
        build_head_splits(10, 4, 16, 2)
