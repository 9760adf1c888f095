"""Which rank is called slow."""

from statistics import median

import pytest

from plait.train.faults.pace import Pace, RankPace, SlowRanks, _find_median_without


def build_pace(*busy_s: float, num_steps: int = 10) -> Pace:
    most = max(busy_s)
    return Pace(num_steps, tuple(RankPace(f"rank {rank}", each, most - each) for rank, each in enumerate(busy_s)))


@pytest.mark.parametrize(
    ("busy_s", "slow"),
    [
        ((0.1, 0.1, 0.1, 0.1), []),
        ((0.1, 0.1, 0.3, 0.1), [2]),
        ((0.3, 0.1), [0]),
        ((0.3, 0.1, 0.1, 0.4), [0, 3]),
        ((0.14, 0.1, 0.1, 0.1), []),
        ((0.004, 0.001), []),
        ((0.3,), []),
    ],
)
def test_a_rank_is_slow_that_the_others_wait_for_by_far_and_for_long(busy_s, slow):
    assert build_pace(*busy_s).list_slow() == slow


def test_it_is_named_with_what_it_takes_and_what_the_others_wait():
    assert build_pace(0.1, 0.3).describe_slow() == (
        "slow: rank 1 300 ms busy of a step, the other ranks 100 ms; they wait for 200 ms"
    )


def test_the_metrics_say_which_rank_is_busiest():
    assert build_pace(0.1, 0.3, 0.2).to_record() == {"busy_s_median": 0.2, "busy_s_most": 0.3, "busiest_rank": 1}


def test_it_is_said_once_until_it_changes():
    said, slow, even = SlowRanks(), build_pace(0.1, 0.3), build_pace(0.1, 0.1)
    assert said.describe_change(even) is None
    assert said.describe_change(slow) is not None
    assert said.describe_change(slow) is None
    assert said.describe_change(even) == "no rank is slow any more"
    assert said.describe_change(even) is None


@pytest.mark.parametrize("number", range(1, 8))
def test_a_rank_is_compared_with_the_median_of_the_others(number: int) -> None:
    busy_s = [0.1 * (7 * place % number) for place in range(number)]
    for place, each in enumerate(sorted(busy_s)):
        others = [other for at, other in enumerate(sorted(busy_s)) if at != place]
        expected = median(others) if others else float("inf")
        assert _find_median_without(sorted(busy_s), place) == pytest.approx(expected), each
