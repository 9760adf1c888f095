"""What holds for every server: memory, bandwidths, breakdowns, and the contract's collectives."""

from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plait.config.model import LlamaConfig
from plait.config.presets import load_preset
from plait.contract.model import derive_model
from plait.contract.setting import Setting
from plait.planner.cluster import Cluster
from plait.planner.cost import COMPUTE, Kind
from plait.planner.hardware import Hardware
from plait.planner.inference import InferenceMemoryPart, InferencePrediction, Load, ServerConfig, predict_inference
from plait.planner.inference.logits import derive_logits_gather
from plait.planner.prediction import Verdict
from tests.support.costs import is_sum
from tests.support.hardware import build_variant, scale_links
from tests.support.plans import LLAMA

MODELS = (LLAMA, load_preset("gpt-22b"), load_preset("gpt2"))

_A_FEW = settings(max_examples=40)
"""Each predicts several servers; there are a few thousand of these examples in all."""

_CLOSE = 1 + 1e-9
"""Sums of many terms, in another order."""


@st.composite
def servers(draw: st.DrawFn) -> ServerConfig:
    """Any server of a degree that all models can be cut into, or of one that gives ranks unlike parts."""
    return ServerConfig(
        tp=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        sequence_parallel=draw(st.sampled_from([None, True, False])),
        launch=draw(st.sampled_from(["graph", "host"])),
        quantization=draw(st.sampled_from(["none", "fp8_delayedscaling", "fp8_currentscaling"])),
    )


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Few and many requests, short and long, with room in the positions of the smallest model for twice as much."""
    return Load(
        batch=draw(st.sampled_from([2, 5, 64, 1000])),
        prompt_len=draw(st.sampled_from([1, 37, 256])),
        generate_len=draw(st.sampled_from([1, 20, 200])),
        prefill_batch=draw(st.sampled_from([1, 2])),
    )


@cache
def _scale(bandwidth: float, latency: float = 1.0) -> Hardware:
    return scale_links("h100", latency=latency, bandwidth=bandwidth)


@cache
def _with_memory_of(bandwidth: float) -> Hardware:
    return build_variant("h100", {"memory.bandwidth": f"{3.35 * bandwidth!r} TB/s"})


def _predict(
    server: ServerConfig, load: Load, *, index: int = 0, hardware: Hardware | None = None
) -> InferencePrediction:
    return predict_inference(MODELS[index], Cluster(hardware or _scale(1.0), 16), server, load)


@_A_FEW
@given(servers(), loads(), st.integers(0, 2), st.sampled_from(["batch", "prompt_len", "generate_len"]))
def test_memory_grows_with_batch_and_context(server: ServerConfig, load: Load, index: int, what: str) -> None:
    less, more = (
        _predict(server, each, index=index).memory for each in (load, replace(load, **{what: 2 * getattr(load, what)}))
    )
    assert more.total_bytes > less.total_bytes
    assert more.bytes_of(InferenceMemoryPart.KV_CACHE) > less.bytes_of(InferenceMemoryPart.KV_CACHE)
    assert more.bytes_of(InferenceMemoryPart.WEIGHTS) == less.bytes_of(InferenceMemoryPart.WEIGHTS)


@_A_FEW
@given(servers(), loads(), st.integers(0, 1), st.integers(2, 8))
def test_weights_and_cache_of_a_rank_never_grow_with_the_degree(
    server: ServerConfig, load: Load, index: int, tp: int
) -> None:
    less, more = (_predict(replace(server, tp=each), load, index=index).memory for each in (tp - 1, tp))
    for part in (InferenceMemoryPart.WEIGHTS, InferenceMemoryPart.KV_CACHE):
        assert more.bytes_of(part) <= less.bytes_of(part)


@_A_FEW
@given(servers(), loads(), st.integers(0, 2), st.sampled_from([1.01, 1.5, 8.0]), st.sampled_from([0.25, 1.0, 4.0]))
def test_more_bandwidth_is_never_slower(
    server: ServerConfig, load: Load, index: int, factor: float, start: float
) -> None:
    for build in (_scale, _with_memory_of):
        slow, fast = (_predict(server, load, index=index, hardware=build(each)) for each in (start, start * factor))
        assert fast.time_to_first_token_s <= slow.time_to_first_token_s * _CLOSE
        assert fast.time_per_output_token_s <= slow.time_per_output_token_s * _CLOSE


@_A_FEW
@given(servers(), loads(), st.integers(0, 2))
def test_with_links_that_take_no_time_only_compute_is_left(server: ServerConfig, load: Load, index: int) -> None:
    free = _predict(server, load, index=index, hardware=_scale(inf, 0.0))
    linked = _predict(replace(server, sequence_parallel=free.server.sequence_parallel), load, index=index)
    for cost, real in ((free.prefill, linked.prefill), (free.decode, linked.decode)):
        by_kind = cost.sum_by_kind()
        assert by_kind[Kind.COMMUNICATION] == 0.0
        assert cost.seconds == pytest.approx(sum(by_kind[kind] for kind in COMPUTE))
        assert cost.seconds == pytest.approx(sum(real.sum_by_kind()[kind] for kind in COMPUTE))


@_A_FEW
@given(servers(), loads(), st.integers(0, 2))
def test_breakdowns_add_up(server: ServerConfig, load: Load, index: int) -> None:
    prediction = _predict(server, load, index=index)
    for cost, terms in (
        (prediction.prefill, prediction.prefill_terms),
        (prediction.decode, prediction.decode_terms),
    ):
        assert is_sum(cost)
        assert sum(cost.sum_by_kind().values()) == pytest.approx(cost.seconds)
        assert sum(seconds for _, seconds in terms) == pytest.approx(cost.seconds)
        assert all(seconds >= 0 for _, seconds in terms)
        assert cost.low_s <= cost.seconds <= cost.high_s
    memory = prediction.memory
    assert sum(size for _, size in memory.parts) == memory.total_bytes
    assert memory.margin_bytes == memory.capacity_bytes - memory.total_bytes


@_A_FEW
@given(servers(), loads(), st.integers(0, 2))
def test_what_moves_for_a_token_is_the_contracts(server: ServerConfig, load: Load, index: int) -> None:
    prediction = _predict(server, load, index=index)
    model = MODELS[index]
    served = model if isinstance(model, LlamaConfig) else model.model_copy(update={"dropout": 0.0})
    contract = derive_model(served, Setting(load.batch, 1, server.tp, sequence_parallel=False))
    logits = [move.collective for move in derive_logits_gather(contract)]
    assert prediction.decode.count_collectives() == Counter([*contract.forward_collectives, *logits])
    assert all(each.kind == "all_reduce" for each in contract.forward_collectives)


@_A_FEW
@given(servers(), loads(), st.integers(0, 2))
def test_the_largest_batch_fits_and_one_more_does_not(server: ServerConfig, load: Load, index: int) -> None:
    memory = _predict(server, load, index=index).memory
    assume(memory.max_batch >= load.prefill_batch)
    largest, beyond = (
        _predict(server, replace(load, batch=batch), index=index).memory
        for batch in (memory.max_batch, memory.max_batch + 1)
    )
    assert largest.verdict is Verdict.FITS
    assert beyond.verdict is not Verdict.FITS
    if load.batch <= memory.max_batch:
        assert memory.max_cached_tokens >= load.batch * load.context_len
