"""Stages of a pipeline: every block is somewhere, and as many micro-batches are in flight as the schedule has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.contract.pipeline.order import Pipeline
from plait.planner.plan_config import PlanConfig, PlannedSchedule
from plait.planner.stages import count_listed, derive_stages


def _build_order(pp: int, interleave: int, batches: int, schedule: PlannedSchedule = "1f1b") -> Pipeline:
    return PlanConfig(pp=pp, interleave=interleave, schedule=schedule).build_order(batches)


@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 8), st.integers(1, 64))
def test_every_block_is_on_one_stage(num_layers: int, pp: int, interleave: int, batches: int) -> None:
    stages = derive_stages(num_layers, _build_order(pp, interleave, batches))
    assert sum(stage.num_layers for stage in stages) == num_layers
    assert [stage.is_first for stage in stages] == [True] + [False] * (pp - 1)
    assert [stage.is_last for stage in stages] == [False] * (pp - 1) + [True]


def test_llama_405b_counts_embedding_and_head_as_a_block_each() -> None:
    layers = [stage.num_layers for stage in derive_stages(126, _build_order(8, 8, 64))]
    assert layers == [15, 16, 16, 16, 16, 16, 16, 15]


def test_first_stage_of_1f1b_holds_as_many_micro_batches_as_there_are_stages() -> None:
    assert [stage.in_flight for stage in derive_stages(8, _build_order(4, 1, 16))] == [4, 3, 2, 1]
    # With fewer micro-batches than ranks all forwards come first (gpipe).
    assert [stage.in_flight for stage in derive_stages(8, _build_order(4, 1, 2))] == [2, 2, 2, 2]
    assert [stage.ends_in_flight for stage in derive_stages(8, _build_order(4, 1, 2))] == [1, 1, 1, 2]


@pytest.mark.parametrize(("pp", "interleave"), [(8, 3), (35, 3), (4, 8)])
def test_interleaving_holds_the_factor_of_korthikanti(pp: int, interleave: int) -> None:
    first = derive_stages(pp * interleave, _build_order(pp, interleave, 1000))[0]
    assert first.in_flight == pytest.approx(pp * (1 + (pp - 1) / (pp * interleave)))


@pytest.mark.parametrize(("pp", "interleave", "batches"), [(2, 1, 8), (4, 1, 4), (4, 1, 16), (4, 2, 8), (3, 3, 9)])
def test_what_is_in_flight_is_what_the_lists_of_a_schedule_say(pp: int, interleave: int, batches: int) -> None:
    pipeline = _build_order(pp, interleave, batches)
    for stage in derive_stages(pp * interleave, pipeline):
        assert (stage.in_flight, stage.halves, stage.ends_in_flight) == count_listed(pipeline, stage.index)


@pytest.mark.parametrize(("pp", "interleave", "batches"), [(2, 1, 8), (4, 1, 8), (4, 2, 64)])
def test_zero_bubble_holds_as_many_on_all_ranks_and_later_ones_more_of_them_half_way(
    pp: int, interleave: int, batches: int
) -> None:
    stages = derive_stages(pp * interleave, _build_order(pp, interleave, batches, "zero_bubble"))
    assert {stage.in_flight for stage in stages} == {float(pp)}
    assert [stage.halves * interleave for stage in stages] == [max(1, rank + 1) for rank in range(pp)]
    assert stages[-1].ends_in_flight == pp


def test_rounds_of_a_long_step_hold_what_the_first_ones_do() -> None:
    long = _build_order(4, 2, 96, "zero_bubble")
    for stage in derive_stages(32, long):
        assert (stage.in_flight, stage.halves, stage.ends_in_flight) == count_listed(long, stage.index)
