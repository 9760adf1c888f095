"""Where the tokens of a rank are in the whole batch, token by token."""

from hypothesis import given
from hypothesis import strategies as st

from plait.contract.context.sequences import Sequences
from plait.sharding import Interval
from plait.sharding.token_order import Order, build_order


@given(st.sampled_from(Order), st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.data())
def test_runs_are_the_places_of_own_tokens_in_the_batch(
    order: Order, size: int, degree: int, batch: int, data: st.DataObject
) -> None:
    dealt = build_order(order, size, degree)
    rank = data.draw(st.integers(0, degree - 1))
    positions = [position for chunk in dealt.chunks[rank] for position in range(chunk.start, chunk.stop)]
    places = [row * size + position for row in range(batch) for position in positions]
    start = data.draw(st.integers(0, len(places)))
    own = Interval(start, data.draw(st.integers(start, len(places))))
    runs = Sequences(dealt, rank).list_runs(own)
    assert [place for run in runs for place in range(run.start, run.stop)] == places[own.start : own.stop]


def test_the_tokens_of_all_ranks_are_the_batch_once() -> None:
    dealt = build_order(Order.ZIGZAG, 11, 3)
    every = [Sequences(dealt, rank) for rank in range(3)]
    runs = [run for each in every for run in each.list_runs(Interval(0, 2 * each.num_own))]
    assert sorted(place for run in runs for place in range(run.start, run.stop)) == list(range(22))
