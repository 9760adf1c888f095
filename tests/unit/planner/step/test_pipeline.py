"""Pipelines: the slowest stage sets the pace, and the others' time is the bubble."""

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config.run import RunConfig
from plait.contract.pipeline.clock import build_even_seconds, simulate
from plait.contract.pipeline.order import Pipeline
from plait.contract.pipeline.step import derive_stage_collectives
from plait.contract.training import derive_run_model
from plait.errors import ConfigError
from plait.planner.cluster import Cluster
from plait.planner.cost import Kind, build_leaf, join
from plait.planner.plan_config import PlanConfig, PlannedSchedule
from plait.planner.planned import derive_planned_model
from plait.planner.run_config import build_run_config
from plait.planner.stages import list_stages
from plait.planner.step.block import Layers
from plait.planner.step.circumstance import Circumstance
from plait.planner.step.pipeline import build_pipeline
from plait.planner.step.zero_bubble import bound_zero_bubble, list_stage_seconds, time_zero_bubble
from tests.support.hardware import scale_links
from tests.support.plans import LLAMA, predict_small


def test_a_step_of_equal_stages_is_the_usual_formula() -> None:
    """Nearly: one stage has the head, another the embedding."""
    plan = PlanConfig(tp=4, pp=4)
    prediction = predict_small(plan, batches=8)
    step = prediction.step
    block_s = step.find("forward").seconds + step.find("backward").seconds
    stage_s = 8 * block_s
    head_s, embedding_s = step.find("head").seconds, predict_small(PlanConfig(tp=4)).step.find("embedding").seconds
    sends_s = step.find("sends").seconds
    assert step.find("micro-batches").seconds == pytest.approx(8 * (stage_s + head_s + sends_s))
    assert step.find("bubble").seconds == pytest.approx(3 * (stage_s + sends_s) + embedding_s)


def test_chunks_divide_the_bubble_and_multiply_what_is_sent() -> None:
    plan = PlanConfig(tp=4, pp=4, overlaps_sends=False)
    one, four = (predict_small(replace(plan, interleave=interleave), batches=8).step for interleave in (1, 4))
    assert four.find("sends").seconds == pytest.approx(4 * one.find("sends").seconds)
    assert four.find("bubble").seconds < one.find("bubble").seconds / 2


def test_sends_hide_beneath_the_next_chunk_if_there_is_one() -> None:
    plan = PlanConfig(tp=4, pp=4, interleave=2)
    hidden = predict_small(plan, batches=8).step.find("sends")
    assert hidden.seconds == 0.0
    assert hidden.hidden_s > 0.0
    shown = predict_small(replace(plan, overlaps_sends=False), batches=8).step.find("sends")
    assert shown.seconds == pytest.approx(hidden.hidden_s)


def _time(plan: PlanConfig, batches: int, layers: Layers, num_layers: int = 12) -> float:
    """On links that take no time."""
    where = Circumstance(
        Cluster(scale_links("h100", latency=0.0, bandwidth=inf), plan.num_devices),
        plan,
        derive_planned_model(LLAMA, plan, 2048),
    )
    return sum(cost.seconds for cost in build_pipeline(layers, list_stages(num_layers, plan, batches), where))


def _build_layers(*, ends_s: float = 0.0) -> Layers:
    """A block of 1 s forward and twice that backward, half of it for gradients of weights."""
    gemms = {name: build_leaf(name, Kind.GEMM, 1.0, 0.1) for name in ("forward", "dgrad", "wgrad")}
    return Layers(
        join("forward", [gemms["forward"]]),
        join("backward", [gemms["dgrad"], gemms["wgrad"]]),
        join("embedding", [build_leaf("look up", Kind.MEMORY_BOUND, ends_s, 0.1)]),
        join("head", [build_leaf(name, Kind.GEMM, ends_s, 0.1) for name in gemms]),
    )


@pytest.mark.parametrize(
    ("pp", "interleave", "schedule", "batches"),
    [
        (2, 1, "1f1b", 2), (4, 1, "1f1b", 4), (4, 1, "1f1b", 12), (3, 2, "interleaved", 6), (2, 3, "interleaved", 8),
        (4, 1, "1f1b", 2), (4, 1, "zero_bubble", 4), (3, 1, "zero_bubble", 15), (3, 2, "zero_bubble", 60),
    ],
)  # fmt: skip
def test_even_stages_take_what_the_clock_of_the_schedule_says(
    pp: int, interleave: int, schedule: PlannedSchedule, batches: int
) -> None:
    plan = PlanConfig(pp=pp, interleave=interleave, schedule=schedule)
    pipeline = plan.build_order(batches)
    times = simulate(pipeline, build_even_seconds(pipeline, 12 / pp, 24 / pp))
    assert _time(plan, batches, _build_layers()) == pytest.approx(times.total_s)


@pytest.mark.parametrize(("pp", "interleave"), [(2, 1), (4, 1), (4, 3)])
def test_many_rounds_are_timed_by_the_first(pp: int, interleave: int) -> None:
    """Also where the last stage is the slowest by far."""
    layers, pipeline = _build_layers(ends_s=2.0), Pipeline("zero_bubble", pp, interleave, 16 * pp)
    seconds = list_stage_seconds(pipeline, layers, 12, 0.25)
    whole = simulate(pipeline, lambda action: seconds[action.stage][action.work], send_s=0.125)
    assert time_zero_bubble(pipeline, layers, 12, again_s=0.25, send_s=0.125) == pytest.approx(whole.total_s, rel=2e-3)


@given(
    st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 3]), st.integers(1, 5), st.floats(0.0, 3.0), st.floats(0.0, 0.5)
)
def test_no_zero_bubble_is_below_its_bound(pp: int, interleave: int, rounds: int, ends_s: float, send_s: float) -> None:
    layers, pipeline = _build_layers(ends_s=ends_s), Pipeline("zero_bubble", pp, interleave, rounds * pp)
    seconds = time_zero_bubble(pipeline, layers, 12, again_s=0.25, send_s=send_s)
    assert bound_zero_bubble(pipeline, layers, 12) <= seconds * (1 + 1e-9)


def test_of_even_stages_that_wait_for_nothing_the_bound_is_what_they_take() -> None:
    pipeline = Pipeline("zero_bubble", 4, 1, 12)
    bound = bound_zero_bubble(pipeline, _build_layers(), 12)
    assert bound == pytest.approx(time_zero_bubble(pipeline, _build_layers(), 12, again_s=0.0, send_s=0.0))


def test_zero_bubble_waits_less_and_gathers_more() -> None:
    plan = PlanConfig(tp=4, pp=4)
    plain, split = (predict_small(replace(plan, schedule=schedule), batches=8) for schedule in ("1f1b", "zero_bubble"))  # type: ignore[arg-type]
    assert split.bubble_s < plain.bubble_s / 2
    assert split.memory.total_bytes > plain.memory.total_bytes
    assert any("zero bubble" in weak for weak in split.weak)


@pytest.mark.parametrize("interleave", [1, 2])
def test_collectives_of_zero_bubble_are_the_contracts(interleave: int) -> None:
    """Of the rank of the pipeline that is timed, the slowest."""
    plan = PlanConfig(tp=2, pp=2, interleave=interleave, schedule="zero_bubble", sharded="nothing")
    prediction = predict_small(plan, batches=4)
    run = build_run_config(prediction, RunConfig(model=LLAMA))
    rank = int(prediction.step.find("micro-batches").note.split()[1])
    promised = derive_stage_collectives(run, [derive_run_model(run)] * 4, rank)
    assert prediction.step.count_collectives() == Counter(promised)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PlanConfig(schedule="zero_bubble"), "needs a pipeline"),
        (
            PlanConfig(pp=2, schedule="zero_bubble", recompute="full"),
            "recompute = full does not go with",
        ),
        (PlanConfig(pp=4, schedule="zero_bubble", micro_batch=1), "9 micro-batches cannot be done in 2 equal rounds"),
    ],
)
def test_zero_bubble_that_no_run_has_is_refused(plan: PlanConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict_small(plan, batches=9)
