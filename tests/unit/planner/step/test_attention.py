"""Attention: the contract's heads and lengths, alone or round a ring."""

from collections import Counter

import pytest

from plait.config.run import RunConfig
from plait.contract.context.attention import ContextMethod
from plait.contract.step import list_collectives, list_messages
from plait.contract.training import derive_run_model
from plait.errors import ConfigError
from plait.planner.plan_config import PlanConfig
from plait.planner.run_config import build_run_config
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
    steps = ring.find("steps")
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


@pytest.mark.parametrize("method", ContextMethod)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_moves_over_cp_is_what_the_written_run_moves(method: ContextMethod, recompute: str) -> None:
    plan = PlanConfig(tp=2, cp=4, context_method=method.value, recompute=recompute, sharded="nothing")  # type: ignore[arg-type]
    prediction = predict_small(plan, batches=2)
    run = build_run_config(prediction, RunConfig(model=LLAMA))
    assert run.context.method == method
    contract = derive_run_model(run)
    again = [] if recompute == "none" else list_collectives(step for op in contract.block for step in op.forward)
    each = Counter([*again, *list_collectives(step for op in contract.block for step in (*op.forward, *op.backward))])
    promised = {move: 2 * LLAMA.num_layers * count for move, count in each.items() if move.axis == "cp"}
    assert {m: n for m, n in prediction.step.count_collectives().items() if m.axis == "cp"} == promised
    assert bool(promised) is (method is not ContextMethod.RING)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_ring_sends_what_the_contract_says(direction: str) -> None:
    prediction = predict_small(PlanConfig(tp=2, cp=4, sharded="nothing"))
    contract = derive_run_model(build_run_config(prediction, RunConfig(model=LLAMA)))
    (core,) = (op for op in contract.block if op.is_attention)
    sent = sum(each.sent_bytes for each in list_messages(getattr(core, direction)))
    assert prediction.step.find(direction).find("ring of keys and values").note == f"{sent} B sent"


def test_dealt_heads_see_whole_sequences_in_one_step() -> None:
    dealt = predict_small(PlanConfig(cp=4, context_method="all_to_all"), seq_len=32768).step
    one = predict_small(PlanConfig(), seq_len=32768).step
    steps = dealt.find("layers.0.attention").find("steps")
    assert steps.times == 1
    assert steps.seconds == pytest.approx(one.find("core").seconds / 4, rel=0.1)
    assert dealt.find("core").note == "8 heads of 32768 queries"


def test_all_keys_are_waited_for() -> None:
    ring, whole = (
        predict_small(PlanConfig(cp=8, context_method=method), seq_len=32768)  # type: ignore[arg-type]
        for method in ("ring", "all_gather")
    )
    assert whole.exposed_communication_s > ring.exposed_communication_s


def test_heads_that_do_not_suffice_are_not_dealt() -> None:
    with pytest.raises(ConfigError, match="cannot be dealt to cp = 8 ranks"):
        predict_small(PlanConfig(tp=8, cp=8, context_method="all_to_all"))
