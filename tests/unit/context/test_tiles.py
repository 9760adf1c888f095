"""Tiles are what a mask shows, pair by pair, and hardly more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.contract.context.attention import ContextPlan
from plait.contract.context.mask import AttentionMask, build_documents, count_band
from plait.contract.context.tiles import Tile, derive_tiles
from plait.errors import ShardingError
from plait.sharding import Interval
from plait.sharding.token_order import Order, build_order
from tests.support.context_strategies import plans

Pair = tuple[int, int, int]
"""Row of the batch, query position, key position."""


def list_positions(chunks: tuple[Interval, ...]) -> list[int]:
    return [position for chunk in chunks for position in range(chunk.start, chunk.stop)]


def is_visible(mask: AttentionMask, row: int, i: int, j: int) -> bool:
    if mask.documents:
        own = mask.documents[row if len(mask.documents) > 1 else 0]
        if not any(each.start <= i < each.stop and each.start <= j < each.stop for each in own):
            return False
    return (not mask.causal or j <= i) and (mask.window is None or abs(i - j) < mask.window)


def list_seen(tile: Tile, q: list[int], k: list[int]) -> list[Pair]:
    return [
        (row, q[tile.q.start + u], k[tile.k.start + w])
        for row in range(tile.batch.start, tile.batch.stop)
        for u in range(len(tile.q))
        for w in range(len(tile.k))
        if (tile.low is None or u - w >= tile.low) and (tile.high is None or u - w <= tile.high)
    ]


@given(plans(), st.integers(1, 6), st.data())
def test_every_pair_that_sees_each_other_is_in_exactly_one_tile(plan: ContextPlan, band_rows: int, data) -> None:
    rank, owner = (data.draw(st.integers(0, plan.degree - 1)) for _ in range(2))
    q_chunks, k_chunks = plan.order.chunks[rank], plan.order.chunks[owner]
    q, k = list_positions(q_chunks), list_positions(k_chunks)
    seen = []
    for tile in derive_tiles(q_chunks, k_chunks, plan.mask, plan.batch, band_rows):
        own = list_seen(tile, q, k)
        assert len(own) == tile.num_visible > 0
        assert tile.num_scores >= tile.num_visible
        seen += own
    rows = range(plan.batch)
    assert sorted(seen) == [(b, i, j) for b in rows for i in q for j in k if is_visible(plan.mask, b, i, j)]
    counted = sum(plan.mask.count_visible(b, one, other) for b in rows for one in q_chunks for other in k_chunks)
    assert counted == len(seen)


@given(st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(-12, 12), st.none() | st.integers(-12, 12))
def test_pairs_of_a_band_are_counted(num_q: int, num_k: int, low: int | None, high: int | None) -> None:
    if low is not None and high is not None and low > high + 1:
        return
    pairs = [u - w for u in range(num_q) for w in range(num_k)]
    inside = [each for each in pairs if (low is None or each >= low) and (high is None or each <= high)]
    assert count_band(num_q, num_k, low, high) == len(inside)


def test_a_causal_zigzag_needs_no_mask_but_on_the_diagonal() -> None:
    plan = ContextPlan(build_order(Order.ZIGZAG, 64, 4), AttentionMask(), 2)
    whole, half = Interval(0, 16), (Interval(0, 8), Interval(8, 16))
    batch = Interval(0, 2)
    assert plan.block_tiles(1, 0) == (Tile(batch, whole, half[0]),)
    assert plan.block_tiles(1, 2) == (Tile(batch, half[1], whole),)
    own = plan.block_tiles(1, 1)
    assert [tile.is_full or tile.is_causal for tile in own] == [True] * 3
    assert sum(tile.num_scores for tile in own) == sum(tile.num_visible for tile in own)


def test_a_long_window_is_computed_in_full_and_causal_tiles_but_for_its_far_edge() -> None:
    plan = ContextPlan(build_order(Order.CONTIGUOUS, 8192, 2), AttentionMask(window=2048), 1)
    tiles = plan.row_tiles(1)
    scores = sum(tile.num_scores for tile in tiles)
    assert scores < 1.07 * sum(tile.num_visible for tile in tiles)
    assert all(len(tile.q) <= 256 and len(tile.k) <= 256 for tile in tiles if not (tile.is_full or tile.is_causal))


def test_rows_with_the_same_documents_are_computed_together() -> None:
    mask = AttentionMask(documents=build_documents([[8, 8], [8, 8], [16]]))
    batches = {tile.batch for tile in ContextPlan(build_order(Order.CONTIGUOUS, 16, 1), mask, 3).whole_tiles()}
    assert batches == {Interval(0, 2), Interval(2, 3)}


def test_masks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShardingError, match="^a window of 0 tokens would hide each token from itself"):
        AttentionMask(window=0)
    with pytest.raises(ShardingError, match="^row 1: documents 0:4 and 3:5 are not one behind the other"):
        AttentionMask(documents=((), (Interval(0, 4), Interval(3, 5))))
    with pytest.raises(ShardingError, match=r"^row 0: documents of lengths \[2, -1\]: a length is negative"):
        build_documents([[2, -1]])
    mask = AttentionMask(documents=build_documents([[4], [5]]))
    with pytest.raises(ShardingError, match="^a mask has documents for 2 rows, but the batch has 3"):
        mask.check_fits(3, 5)
    with pytest.raises(ShardingError, match="^row 1: document 0:5 goes beyond the 4 tokens of a sequence"):
        mask.check_fits(2, 4)
