"""Attention: the contract's heads and lengths, alone or round a ring."""

import pytest

from plait.planner.plan_config import PlanConfig
from tests.support.plans import GPT, LLAMA, predict_small


def test_unfused_attention_pays_for_its_scores() -> None:
    fused, unfused = (
        predict_small(PlanConfig(tp=4, fused_attention=is_fused), model=GPT).step.find("layers.0.attention").seconds
        for is_fused in (True, False)
    )
    assert unfused > 2 * fused


def test_a_ring_computes_as_much_in_shorter_steps_and_hides_what_travels() -> None:
    one, ring = (predict_small(PlanConfig(cp=cp), seq_len=32768).step.find("layers.0.attention") for cp in (1, 4))
    # Half of every step is masked, so four steps over a quarter of the queries are a quarter of the FLOPs.
    steps = ring.find("ring steps")
    assert steps.times == 4
    assert one.seconds / 4 < steps.seconds < 1.1 * one.seconds / 4
    travels = ring.find("ring of keys and values")
    assert travels.seconds == 0.0
    assert travels.hidden_s > 0.0


def test_short_sequences_wait_for_the_ring() -> None:
    ring = predict_small(PlanConfig(cp=4, tp=4), seq_len=1024).step.find("ring of keys and values")
    assert ring.seconds > 0.0


def test_efficiency_is_that_of_causal_flops() -> None:
    core = predict_small(PlanConfig(), seq_len=8192).step.find("core")
    flops = 2 * LLAMA.num_heads * 8192**2 * LLAMA.head_width
    assert core.efficiency == pytest.approx(flops / core.seconds / 989e12)
