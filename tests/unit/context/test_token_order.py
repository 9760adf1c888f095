import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.contract.context.attention import ContextPlan
from plait.contract.context.balance import derive_balance
from plait.contract.context.mask import AttentionMask
from plait.errors import ShardingError
from plait.sharding import Interval
from plait.sharding.token_order import Order, TokenOrder, build_order
from tests.support.context_strategies import MAX_DEGREE, orders


def list_positions(chunks: tuple[Interval, ...]) -> list[int]:
    return [position for chunk in chunks for position in range(chunk.start, chunk.stop)]


@given(orders())
def test_an_order_is_a_permutation_that_is_taken_back(order: TokenOrder) -> None:
    stored = list_positions(order.stored)
    assert sorted(stored) == list(range(order.size))
    assert [stored[place] for place in list_positions(order.restoring)] == list(range(order.size))
    assert order.is_restored == (stored == list(range(order.size)))


@given(orders())
def test_ranks_hold_alike_many_tokens_where_the_split_says(order: TokenOrder) -> None:
    stored = list_positions(order.stored)
    lengths = order.split.lengths
    assert max(lengths) - min(lengths) <= 1
    for own, rows in zip(order.chunks, order.split.intervals, strict=True):
        assert list_positions(own) == stored[rows.start : rows.stop]


@given(st.integers(0, 20), st.integers(1, MAX_DEGREE))
def test_zigzag_gives_an_early_and_a_late_chunk_and_the_same_causal_work(chunk: int, degree: int) -> None:
    order = build_order(Order.ZIGZAG, 2 * degree * chunk, degree)
    for rank, own in enumerate(order.chunks if chunk else ()):
        assert [each.start // chunk for each in own] == [rank, 2 * degree - 1 - rank]
    work = {rank.visible for rank in derive_balance(ContextPlan(order, AttentionMask(), 1)).ranks}
    assert len(work) == 1


@given(st.integers(0, 200), st.integers(1, MAX_DEGREE))
def test_where_chunks_differ_by_a_token_the_work_differs_by_two_rows_of_scores_at_most(size: int, degree: int) -> None:
    balance = derive_balance(ContextPlan(build_order(Order.ZIGZAG, size, degree), AttentionMask(), 1))
    work = [rank.visible for rank in balance.ranks]
    assert max(work) - min(work) <= 2 * size
    assert sum(work) == size * (size + 1) // 2


def test_contiguous_parts_leave_the_last_rank_almost_twice_the_work() -> None:
    balance = derive_balance(ContextPlan(build_order(Order.CONTIGUOUS, 8192, 8), AttentionMask(), 1))
    assert balance.ranks[7].visible == 7 * 1024**2 + 1024 * 1025 // 2
    assert round(balance.imbalance, 3) == 2 - 1 / 8
    assert [rank.skipped for rank in balance.ranks] == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "chunks",
    [
        ((Interval(0, 3),), (Interval(4, 6),)),
        ((Interval(0, 4),), (Interval(3, 6),)),
        ((Interval(3, 6), Interval(0, 3)),),
        ((Interval(0, 3),),),
    ],
)
def test_chunks_that_leave_gaps_overlap_or_fall_back_are_refused(chunks: tuple[tuple[Interval, ...], ...]) -> None:
    with pytest.raises(ShardingError, match="^chunks .* do not cover 0:6 exactly once, in rising order on each rank$"):
        TokenOrder(6, chunks)
