import pytest

from plait.config.train import TrainConfig
from plait.train.schedule import derive_learning_rate

CONFIG = TrainConfig(steps=101, warmup_steps=20, learning_rate=0.5, min_learning_rate_ratio=0.1)


def test_the_warm_up_rises_in_equal_steps_and_its_first_step_moves() -> None:
    assert [derive_learning_rate(step, CONFIG) for step in (0, 1, 9, 19)] == [0.025, 0.05, 0.25, 0.5]


def test_the_cosine_starts_at_the_peak_and_ends_at_the_minimum_with_the_last_step() -> None:
    assert derive_learning_rate(20, CONFIG) == 0.5
    assert derive_learning_rate(60, CONFIG) == pytest.approx(0.5 * (1 + 0.1) / 2, rel=1e-12)
    assert derive_learning_rate(100, CONFIG) == pytest.approx(0.05, rel=1e-12)


def test_the_rate_never_rises_after_the_warm_up() -> None:
    rates = [derive_learning_rate(step, CONFIG) for step in range(20, 101)]
    assert rates == sorted(rates, reverse=True)


def test_a_run_that_is_all_warm_up_has_a_rate_for_every_step() -> None:
    config = TrainConfig(steps=3, warmup_steps=3, learning_rate=3.0)
    assert [derive_learning_rate(step, config) for step in range(3)] == [1.0, 2.0, 3.0]


def test_a_single_step_has_the_full_rate() -> None:
    assert derive_learning_rate(0, TrainConfig(steps=1, learning_rate=0.25)) == 0.25
