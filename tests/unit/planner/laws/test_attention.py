from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner.assumed import find_constants
from plait.planner.hardware import list_hardware, load_hardware
from plait.planner.laws import AttentionShape, estimate_flash_attention, estimate_unfused_attention

LLAMA = AttentionShape(batch=1, heads=32, kv_heads=8, queries=8192, keys=8192, head_width=128)
GPT = AttentionShape(batch=4, heads=8, kv_heads=8, queries=2048, keys=2048, head_width=96)


def test_a_causal_mask_saves_half_and_a_decoded_token_nothing() -> None:
    full = 4 * 32 * 8192 * 8192 * 128
    assert LLAMA.flops == full / 2
    assert AttentionShape(1, 32, 8, 8192, 8192, 128, causal=False).flops == full
    assert AttentionShape(1, 32, 8, 1, 8192, 128).flops == full / 8192


def test_a_chunk_of_queries_sees_all_keys_before_it() -> None:
    """The two halves of a causal sequence, the second over all keys, are the whole."""
    first = AttentionShape(1, 32, 8, 4096, 4096, 128)
    second = AttentionShape(1, 32, 8, 4096, 8192, 128)
    assert first.flops + second.flops == LLAMA.flops


def test_forward_by_hand() -> None:
    """A100: 204 TFLOP/s s / (s + 390)."""
    expected = 3e-6 + LLAMA.flops / (204e12 * 8192 / (8192 + 390))
    assert estimate_flash_attention(load_hardware("a100"), LLAMA, regime="burst").seconds == pytest.approx(expected)


def test_backward_is_five_gemms_for_two_at_three_quarters_of_the_rate() -> None:
    hardware = load_hardware("h100")
    forward, backward = (estimate_flash_attention(hardware, LLAMA, backward=turn) for turn in (False, True))
    assert (backward.seconds - 3e-6) / (forward.seconds - 3e-6) == pytest.approx(2.5 / 0.75)
    assert backward.uncertainty > forward.uncertainty
    assert "attention.backward_rate" in backward.constants


def test_decode_reads_the_cache() -> None:
    shape = AttentionShape(batch=64, heads=8, kv_heads=1, queries=1, keys=8192, head_width=128)
    estimate = estimate_flash_attention(load_hardware("h100"), shape)
    assert estimate.limit == "memory"
    assert estimate.seconds == pytest.approx(3e-6 + 64 * 2 * 8192 * 128 * 2 / (3.35e12 * 0.8), rel=0.01)


@pytest.mark.parametrize("backward", [False, True])
def test_scores_in_memory_cost_more_than_those_that_never_leave(backward: bool) -> None:
    hardware = load_hardware("a100")
    fused = estimate_flash_attention(hardware, GPT, backward=backward)
    unfused = estimate_unfused_attention(hardware, GPT, backward=backward)
    assert unfused.seconds > 1.5 * fused.seconds
    assert unfused.limit == "memory"


def test_unfused_is_at_least_the_bytes_of_its_scores() -> None:
    hardware = load_hardware("a100")
    scores = 4 * 8 * 2048 * 2048
    assert GPT.num_scores == scores
    assert estimate_unfused_attention(hardware, GPT).seconds > 9 * scores / (2.039e12 * 0.8)
    assert estimate_unfused_attention(hardware, GPT, backward=True).seconds > 11 * scores / (2.039e12 * 0.8)


SHAPES = st.builds(
    AttentionShape, st.integers(1, 64), st.integers(1, 64), st.just(1), st.integers(1, 9000), st.integers(1, 9000),
    st.sampled_from([64, 128]), st.booleans(),
)  # fmt: skip


@given(st.sampled_from([name for name in list_hardware() if name != "cpu"]), SHAPES, st.booleans())
def test_attention_takes_time_and_names_its_constants(name: str, shape: AttentionShape, backward: bool) -> None:
    hardware = load_hardware(name)
    for estimate in (
        estimate_flash_attention(hardware, shape, backward=backward),
        estimate_unfused_attention(hardware, shape, backward=backward),
    ):
        assert estimate.seconds > 0
        assert 0 < estimate.uncertainty < 1
        assert {each.name for each in find_constants(estimate.constants, hardware)} == set(estimate.constants)


@given(SHAPES, st.integers(2, 5))
def test_more_heads_and_sequences_are_never_faster(shape: AttentionShape, times: int) -> None:
    hardware = load_hardware("h100")
    more = AttentionShape(
        shape.batch * times, shape.heads, shape.kv_heads, shape.queries, shape.keys, shape.head_width, shape.causal
    )
    for law in (estimate_flash_attention, estimate_unfused_attention):
        assert law(hardware, more).seconds >= law(hardware, shape).seconds


def test_no_kernel_is_faster_than_the_peak_of_its_format() -> None:
    hardware = load_hardware("cpu")
    long = replace(LLAMA, queries=65536, keys=65536)
    for dtype in ("bfloat16", "float32"):
        seconds = estimate_flash_attention(hardware, long, dtype=dtype).seconds
        assert long.flops / seconds <= hardware.peak(dtype).value
