"""What holds for every plan: memory, links and breakdowns."""

from dataclasses import replace
from functools import cache
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.config.overlap import OverlapConfig
from plait.planner.cost import COMPUTE, Kind
from plait.planner.hardware import Hardware
from plait.planner.plan_config import PlanConfig
from tests.support.costs import is_sum
from tests.support.hardware import scale_links
from tests.support.plans import LLAMA, MODELS, predict_small

_POWERS = st.sampled_from([1, 2, 4])


@st.composite
def plans(draw: st.DrawFn) -> PlanConfig:
    """Any combination of degrees and choices that small models can be cut into."""
    pp = draw(_POWERS)
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    quantization = draw(st.sampled_from(["none", "fp8_delayedscaling", "fp8_currentscaling"]))
    can_split = pp > 1 and recompute == quantization == "none"
    return PlanConfig(
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        sequence_parallel=draw(st.booleans()),
        cp=draw(_POWERS),
        context_method=draw(st.sampled_from(["ring", "all_gather"])),
        pp=pp,
        interleave=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        schedule=draw(st.sampled_from(["1f1b", "zero_bubble"])) if can_split else "1f1b",
        dp_replicate=draw(_POWERS),
        dp_shard=draw(_POWERS),
        sharded=draw(st.sampled_from(["nothing", "optimizer", "gradients", "parameters"])),
        micro_batch=draw(_POWERS),
        recompute=recompute,
        overlap=OverlapConfig(policy=draw(st.sampled_from(["auto", "mlp_only", "disabled"]))),
        quantization=quantization,
        fused_attention=draw(st.booleans()),
        overlaps_gradients=draw(st.booleans()),
        overlaps_sends=draw(st.booleans()),
    )


@cache
def _scale(bandwidth: float, latency: float = 1.0) -> Hardware:
    return scale_links("h100", latency=latency, bandwidth=bandwidth)


def _count_bytes(plan: PlanConfig, *, seq_len: int = 2048, index: int = 0) -> float:
    return predict_small(plan, model=MODELS[index], seq_len=seq_len).memory.total_bytes


@given(plans(), st.integers(0, 1))
def test_memory_grows_with_batch_and_sequence(plan: PlanConfig, index: int) -> None:
    size = _count_bytes(plan, index=index)
    assert _count_bytes(replace(plan, micro_batch=2 * plan.micro_batch), index=index) > size
    assert _count_bytes(plan, seq_len=4096, index=index) > size


@given(plans(), st.integers(0, 1), st.sampled_from(["tp", "cp", "dp_shard"]))
def test_memory_never_grows_with_a_sharding_degree(plan: PlanConfig, index: int, axis: str) -> None:
    more = replace(plan, **{axis: 2 * getattr(plan, axis)})
    assume(more.tp <= 8)
    assert _count_bytes(more, index=index) <= _count_bytes(plan, index=index) * (1 + 1e-9)


@given(plans())
def test_a_longer_pipeline_never_needs_more_without_interleaving(plan: PlanConfig) -> None:
    plan = replace(plan, interleave=1, schedule="1f1b")
    more = replace(plan, pp=2 * plan.pp)
    assert predict_small(more, batches=8).memory.total_bytes <= predict_small(plan, batches=8).memory.total_bytes


@given(plans(), st.integers(0, 1))
def test_with_links_that_take_no_time_only_compute_is_left(plan: PlanConfig, index: int) -> None:
    # A policy that overlaps whatever it costs cuts GEMMs into pieces even then.
    assume(plan.overlap.policy != "mlp_only")
    prediction = predict_small(plan, model=MODELS[index], hardware=_scale(inf, 0.0))
    by_kind = prediction.step.sum_by_kind()
    assert by_kind[Kind.COMMUNICATION] == by_kind[Kind.DATA_PARALLEL] == 0.0
    left = sum(by_kind[kind] for kind in (*COMPUTE, Kind.BUBBLE, Kind.OPTIMIZER))
    assert prediction.step_s == pytest.approx(left)
    linked = predict_small(plan, model=MODELS[index], hardware=_scale(1.0)).step.sum_by_kind()
    assert by_kind[Kind.GEMM] == pytest.approx(linked[Kind.GEMM])


@given(plans(), st.integers(0, 1), st.sampled_from([1.01, 1.5, 2.0, 8.0]), st.sampled_from([0.25, 1.0, 4.0]))
def test_more_bandwidth_is_never_slower(plan: PlanConfig, index: int, factor: float, start: float) -> None:
    slow, fast = (
        predict_small(plan, model=MODELS[index], hardware=_scale(bandwidth)).step_s
        for bandwidth in (start, start * factor)
    )
    assert fast <= slow * (1 + 1e-9)


@given(plans())
def test_auto_is_never_slower_than_no_overlap(plan: PlanConfig) -> None:
    auto, disabled = (
        predict_small(replace(plan, overlap=OverlapConfig(policy=policy))).step_s
        for policy in ("auto", "disabled")  # type: ignore[arg-type]
    )
    assert auto <= disabled * (1 + 1e-9)


@given(plans(), st.integers(0, 1))
def test_breakdowns_add_up(plan: PlanConfig, index: int) -> None:
    prediction = predict_small(plan, model=MODELS[index])
    assert is_sum(prediction.step)
    assert sum(prediction.step.sum_by_kind().values()) == pytest.approx(prediction.step_s)
    assert all(node.seconds >= 0 and node.hidden_s >= 0 for node, _ in prediction.step.walk())
    assert all(node.low_s <= node.seconds * (1 + 1e-9) for node, _ in prediction.step.walk())
    assert all(node.seconds <= node.high_s * (1 + 1e-9) for node, _ in prediction.step.walk())
    assert all(size >= 0 for _, size in prediction.memory.parts)


def test_more_micro_batches_shrink_the_share_of_the_bubble() -> None:
    plan = PlanConfig(tp=2, pp=4)
    shares = [
        prediction.bubble_s / prediction.step_s
        for prediction in (predict_small(plan, batches=batches) for batches in (4, 8, 32))
    ]
    assert shares == sorted(shares, reverse=True)
    interleaved = predict_small(replace(plan, interleave=4), batches=4)
    assert interleaved.bubble_s < predict_small(plan, batches=4).bubble_s
    assert interleaved.memory.total_bytes > predict_small(plan, batches=4).memory.total_bytes


def test_tied_tables_are_held_once_unless_a_pipeline_has_two_ends() -> None:
    tied = LLAMA.model_copy(update={"tied_embeddings": True})
    table = LLAMA.vocab_size * LLAMA.width
    together, apart = (predict_small(PlanConfig(), model=model).memory for model in (tied, LLAMA))
    assert apart.static_bytes - together.static_bytes == pytest.approx(18 * table)
    split = PlanConfig(pp=2)
    assert predict_small(split, model=tied).memory.static_bytes == predict_small(split).memory.static_bytes
