import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner.hardware import list_hardware, load_hardware
from plait.planner.laws import estimate_loss, estimate_memory_bound, estimate_optimizer, estimate_quantize
from tests.support.hardware import build_variant


def test_bytes_at_the_streaming_rate_and_a_launch_for_each_kernel() -> None:
    h100 = load_hardware("h100")
    estimate = estimate_memory_bound(h100, 1e9, kernels=4)
    assert estimate.seconds == pytest.approx(4 * 3e-6 + 1e9 / (0.8 * 3.35e12))
    assert estimate.constants == ("memory.bandwidth", "memory.efficiency", "memory.launch")
    assert estimate.limit == "memory"
    assert estimate_memory_bound(h100, 1e3).limit == "latency"


def test_the_optimizer_moves_thirty_bytes_a_parameter() -> None:
    h100 = load_hardware("h100")
    assert estimate_optimizer(h100, 1e9).seconds == pytest.approx(3e-6 + 30e9 / (0.8 * 3.35e12))


def test_the_loss_moves_ten_bytes_a_logit() -> None:
    h100 = load_hardware("h100")
    assert estimate_loss(h100, 1e9).seconds == pytest.approx(9e-6 + 10e9 / (0.8 * 3.35e12))


def test_quantise_passes_are_counted_in_bytes() -> None:
    h100 = load_hardware("h100")
    seconds = 1e9 / (0.8 * 3.35e12)
    assert estimate_quantize(h100, 1e9).seconds == pytest.approx(6e-6 + 5 * seconds)
    assert estimate_quantize(h100, 1e9, transposed=True).seconds == pytest.approx(6e-6 + 6 * seconds)
    assert estimate_quantize(h100, 1e9, is_scale_known=True).seconds == pytest.approx(3e-6 + 3 * seconds)
    mxfp8 = estimate_quantize(h100, 1e9, is_scale_known=True, transposed=True, element_bytes=33 / 32)
    assert mxfp8.seconds == pytest.approx(3e-6 + (2 + 2 * 33 / 32) * seconds)


def test_a_guessed_bandwidth_makes_it_less_certain() -> None:
    sure, unsure = (estimate_memory_bound(load_hardware(name), 1e9).uncertainty for name in ("a100", "cpu"))
    assert unsure > sure


_FASTER = {name: build_variant(name, {"memory.bandwidth": "90 TB/s"}) for name in list_hardware()}


@given(st.sampled_from(list_hardware()), st.floats(0, 1e12), st.integers(1, 9))
def test_more_bandwidth_is_never_slower(name: str, num_bytes: float, kernels: int) -> None:
    faster = estimate_memory_bound(_FASTER[name], num_bytes, kernels=kernels).seconds
    assert faster <= estimate_memory_bound(load_hardware(name), num_bytes, kernels=kernels).seconds
