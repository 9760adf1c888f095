"""Pipelines: the slowest stage sets the pace, and the others' time is the bubble."""

from dataclasses import replace

import pytest

from plait.planner.plan_config import PlanConfig
from tests.support.plans import predict_small


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
