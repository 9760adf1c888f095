from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from plait.train.corpus.shuffle import permute

SEEDS = st.integers(0, 2**63)

FIRST_EPOCH = [7, 9, 5, 3, 6, 8, 4, 2, 1, 0]
"""Of ten windows, with seed 0."""


@given(st.integers(1, 400), SEEDS, st.integers(0, 1000))
def test_an_epoch_sees_every_window_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(index, size, seed, epoch) for index in range(size)) == list(range(size))


@given(st.integers(1, 2**40), SEEDS, st.data())
def test_a_corpus_of_any_size_is_ordered_without_a_table(size: int, seed: int, data: st.DataObject) -> None:
    first, second = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    places = permute(first, size, seed, 0), permute(second, size, seed, 0)
    assert all(0 <= place < size for place in places)
    assert (places[0] == places[1]) == (first == second)


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = {tuple(permute(i, 50, seed, epoch) for i in range(50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_that_of_earlier_versions() -> None:
    """A checkpoint stores a position, not an order; it resumes exactly only while the order stays what it was."""
    assert [permute(index, 10, seed=0, epoch=0) for index in range(10)] == FIRST_EPOCH


def test_neighbours_are_spread_over_the_corpus() -> None:
    """Of two random places half are more than 0.293 of the corpus apart; a poor mix gives far less."""
    places = [permute(index, 10_000, seed=1, epoch=2) for index in range(10_000)]
    steps = sorted(abs(a - b) for a, b in pairwise(places))
    assert 2700 < steps[len(steps) // 2] < 3160
