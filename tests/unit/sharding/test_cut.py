import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ShardingError
from plait.sharding import Columns, KeyValueHeads, QueryHeads, build_head_splits


@given(size=st.integers(1, 200), degree=st.integers(1, 9))
def test_columns_leave_no_rank_empty_or_are_refused(size: int, degree: int) -> None:
    if size < degree:
        with pytest.raises(ShardingError, match=f"over {degree} ranks: a rank would have none"):
            Columns().build_split(size, degree)
    else:
        assert min(Columns().build_split(size, degree).lengths) > 0


def test_columns_that_stay_together_are_cut_between_units() -> None:
    assert Columns(unit=128).build_split(640, 3).lengths == (256, 256, 128)


def test_too_many_ranks_for_the_units_names_the_degree_that_works() -> None:
    with pytest.raises(ShardingError, match="640 features in units of 128 cannot be cut over 6 ranks") as error:
        Columns(unit=128).build_split(640, 6)
    assert error.value.hint == "use a degree of at most 5"


def test_query_and_kv_cuts_are_two_sides_of_one_head_split() -> None:
    query, kv = QueryHeads(12, 4, 8), KeyValueHeads(12, 4, 8)
    both = build_head_splits(12, 4, 8, 3)
    assert query.build_split(96, 3) == both.query
    assert kv.build_split(32, 3) == both.kv


@pytest.mark.parametrize(
    ("cut", "size", "message"),
    [
        (QueryHeads(12, 4, 8), 100, "100 features are not 12 heads of width 8"),
        (KeyValueHeads(12, 4, 8), 96, "96 features are not 4 heads of width 8"),
    ],
    ids=["query", "kv"],
)
def test_features_that_are_not_the_heads_are_refused(cut: QueryHeads | KeyValueHeads, size: int, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        cut.build_split(size, 2)
