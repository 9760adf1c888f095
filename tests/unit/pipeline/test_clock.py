"""Schedules of pipelines: each action once, no rank waits for ever, and bubbles that are known."""

import pytest

from plait.config.axis.pipeline import Schedule, find_refusal
from plait.contract.pipeline.clock import build_even_seconds, simulate
from plait.contract.pipeline.order import Pipeline, Work
from plait.sharding import list_rank_stages

SIZES = [
    Pipeline(schedule, pp, each, number)
    for schedule, several in (("1f1b", (1,)), ("gpipe", (1,)), ("interleaved", (2, 3)), ("zero_bubble", (1, 2)))
    for each in several
    for pp in (2, 3, 4)
    for number in range(1, 13)
    if find_refusal(schedule, pp, number) is None
]


@pytest.mark.parametrize("pipeline", SIZES, ids=str)
def test_every_micro_batch_goes_through_every_stage_once_both_ways(pipeline: Pipeline) -> None:
    done = [action for rank in range(pipeline.pp) for action in pipeline.list_actions(rank)]
    assert len(set(done)) == len(done)
    works = [Work.FORWARD, Work.BACKWARD]
    if pipeline.schedule == "zero_bubble":
        works = [Work.FORWARD, Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD]
    assert len(done) == len(works) * pipeline.num_stages * pipeline.num_micro_batches
    for rank in range(pipeline.pp):
        stages = list_rank_stages(pipeline.pp, pipeline.stages_per_rank, rank)
        assert {action.stage for action in pipeline.list_actions(rank)} == set(stages)
    assert simulate(pipeline, lambda _: 1.0, send_s=0.5).total_s > 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "number"), [(2, 4), (4, 4), (4, 16), (8, 8)])
def test_one_stage_a_rank_waits_for_the_pipeline_to_fill_and_drain(schedule: Schedule, pp: int, number: int) -> None:
    """Narayanan et al.: (p - 1) / (m + p - 1) of the step."""
    pipeline = Pipeline(schedule, pp, 1, number)
    times = simulate(pipeline, build_even_seconds(pipeline, 1.0, 2.0))
    assert times.total_s == pytest.approx(3 * (number + pp - 1))
    assert times.bubble == pytest.approx((pp - 1) / (number + pp - 1))


@pytest.mark.parametrize(("pp", "each", "number"), [(2, 2, 4), (4, 2, 8), (4, 4, 16)])
def test_several_stages_a_rank_wait_as_much_less(pp: int, each: int, number: int) -> None:
    pipeline = Pipeline("interleaved", pp, each, number)
    times = simulate(pipeline, build_even_seconds(pipeline, 1.0, 2.0))
    assert times.bubble == pytest.approx((pp - 1) / each / (number + (pp - 1) / each))


@pytest.mark.parametrize(("pp", "number"), [(2, 4), (4, 8), (4, 16)])
def test_weights_in_the_bubble_more_than_halve_it(pp: int, number: int) -> None:
    """Qi et al., ZB1P: where a rank would wait, it computes gradients of weights."""
    pipeline = Pipeline("zero_bubble", pp, 1, number)
    times = simulate(pipeline, build_even_seconds(pipeline, 1.0, 2.0))
    plain = simulate(other := Pipeline("1f1b", pp, 1, number), build_even_seconds(other, 1.0, 2.0))
    assert times.total_s - 3 * number < (plain.total_s - 3 * number) / 2
