"""The law of GEMMs against measured rows, and what must hold of it for any shape."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.planner.hardware import Hardware, list_hardware, load_hardware
from plait.planner.laws import Estimate, estimate_gemm
from tests.support.hardware import build_variant, list_rows

GATE_MAPE = 0.08
"""Of the GEMMs of every GPU that rows were measured on."""

ACCELERATORS = [name for name in list_hardware() if name != "cpu"]
MEASURED = sorted({row["hardware"]["gpu"] for row in list_rows("aic_gemm_")})
DIMS = st.integers(1, 20_000)


def _errors(gpu: str) -> list[float]:
    hardware = load_hardware(gpu)
    return [
        estimate_gemm(hardware, *(row["model"][dim] for dim in "mnk"), regime="burst").seconds * 1e6 / row["value"] - 1
        for row in list_rows("aic_gemm_")
        if row["hardware"]["gpu"] == gpu
    ]


@pytest.mark.parametrize("gpu", MEASURED)
def test_gate_on_measured_gemms(gpu: str) -> None:
    errors = _errors(gpu)
    assert len(errors) == 15
    assert fmean(map(abs, errors)) <= GATE_MAPE


def test_the_law_beats_one_efficiency_for_all_gemms() -> None:
    """The null model may choose its one efficiency on these very rows; the law's worst row is better than its worst."""
    shares = []
    for row in list_rows("aic_gemm_"):
        m, n, k = (row["model"][dim] for dim in "mnk")
        peak = load_hardware(row["hardware"]["gpu"]).peak("bfloat16").value
        shares.append(2 * m * n * k / (row["value"] * 1e-6) / peak)
    null = min(([abs(share / constant - 1) for share in shares] for constant in shares), key=fmean)
    errors = [abs(error) for gpu in MEASURED for error in _errors(gpu)]
    assert max(errors) < max(null)
    assert fmean(errors) < 0.6 * fmean(null)


def test_what_is_uncertain_covers_most_measured_rows() -> None:
    """Twice the stated error holds nine of ten rows."""
    inside = []
    for row in list_rows("aic_gemm_"):
        m, n, k = (row["model"][dim] for dim in "mnk")
        estimate = estimate_gemm(load_hardware(row["hardware"]["gpu"]), m, n, k, regime="burst")
        inside.append(abs(estimate.seconds * 1e6 / row["value"] - 1) <= 2 * estimate.uncertainty)
    assert fmean(inside) >= 0.85


def test_the_formula_by_hand() -> None:
    """A100, 8192^3: 64 x 32 tiles of 128 x 256 on 108 multiprocessors."""
    tiles = 2048 / 108
    waves = 0.62 * tiles + 0.38 * 19
    expected = 4.9e-6 + waves * 2 * 128 * 256 * (8192 + 148) / (312e12 / 108 * 0.88)
    assert estimate_gemm(load_hardware("a100"), 8192, 8192, 8192, regime="burst").seconds == pytest.approx(expected)


def test_names_of_constants_are_those_of_the_catalog() -> None:
    for name in ACCELERATORS:
        hardware = load_hardware(name)
        estimate = estimate_gemm(hardware, 4096, 4096, 4096)
        assert set(estimate.constants) <= set(hardware.constants)
        assert {"gemm.bfloat16.efficiency", "peak.bfloat16", "derate.training"} <= set(estimate.constants)
        assert estimate.uncertainty > hardware.gemm("bfloat16").efficiency.uncertainty


@given(st.sampled_from(ACCELERATORS), DIMS, DIMS, DIMS, st.integers(0, 2), st.integers(1, 5000))
def test_a_larger_gemm_is_never_faster(name: str, m: int, n: int, k: int, dim: int, more: int) -> None:
    hardware = load_hardware(name)
    larger = [m, n, k]
    larger[dim] += more
    if min(larger) >= 512 > min(m, n, k):
        return  # from here on the law is another: fitted, not streamed
    assert estimate_gemm(hardware, *larger).seconds >= estimate_gemm(hardware, m, n, k).seconds * (1 - 1e-12)


@given(st.sampled_from(ACCELERATORS), DIMS, DIMS, DIMS)
def test_no_gemm_is_faster_than_the_data_sheet(name: str, m: int, n: int, k: int) -> None:
    hardware = load_hardware(name)
    seconds = estimate_gemm(hardware, m, n, k, regime="burst").seconds
    assert seconds >= 2 * m * n * k / hardware.peak("bfloat16").value
    assert seconds >= 2 * (m * n + n * k + m * k) / hardware.memory.bytes_per_s.value


@given(st.sampled_from(ACCELERATORS), DIMS, DIMS, DIMS)
def test_training_is_never_faster_than_a_burst(name: str, m: int, n: int, k: int) -> None:
    hardware = load_hardware(name)
    burst, sustained, training = (
        estimate_gemm(hardware, m, n, k, regime=regime).seconds for regime in ("burst", "sustained", "training")
    )
    if 2 * m * n * k <= 1e12:
        assert burst <= sustained
    assert burst <= training


@given(DIMS, DIMS, DIMS, st.integers(2, 16))
def test_parts_one_after_another_are_never_faster_than_the_whole(m: int, n: int, k: int, parts: int) -> None:
    hardware = load_hardware("h100")
    chunk = estimate_gemm(hardware, -(-m // parts), n, k).seconds
    if m >= 512 > -(-m // parts):
        return
    assert parts * chunk >= estimate_gemm(hardware, m, n, k).seconds * (1 - 1e-9)


@pytest.mark.parametrize("key", ["peak.bfloat16", "memory.bandwidth"])
@given(m=DIMS, n=DIMS, k=DIMS)
def test_a_better_device_is_never_slower(key: str, m: int, n: int, k: int) -> None:
    faster = _faster(key)
    assert estimate_gemm(faster, m, n, k).seconds <= estimate_gemm(load_hardware("h100"), m, n, k).seconds


_FASTER = {
    "peak.bfloat16": build_variant("h100", {"peak.bfloat16": "1200 TFLOP/s"}),
    "memory.bandwidth": build_variant("h100", {"memory.bandwidth": "5 TB/s"}),
}


def _faster(key: str) -> Hardware:
    return _FASTER[key]


def test_many_small_products_fill_the_device_together() -> None:
    hardware = load_hardware("h100")
    one = estimate_gemm(hardware, 512, 512, 512)
    many = estimate_gemm(hardware, 512, 512, 512, count=64)
    assert many.seconds < 64 * one.seconds / 4


def test_a_thin_product_streams_its_weight() -> None:
    """Decode: [1, K] @ [K, N] reads the weight at the rate of any kernel."""
    hardware = load_hardware("h200")
    estimate = estimate_gemm(hardware, 1, 8192, 28672)
    assert estimate.limit == "memory"
    assert estimate.seconds == pytest.approx(2 * 8192 * 28672 / (4.8e12 * 0.83) + 2.5e-6, rel=1e-3)
    assert estimate.uncertainty > estimate_gemm(hardware, 4096, 8192, 28672).uncertainty


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "gb200-nvl72", "mi300x"])
def test_float8_gains_but_less_than_its_peak_promises(name: str) -> None:
    hardware = load_hardware(name)
    wide, narrow = (estimate_gemm(hardware, 8192, 8192, 8192, dtype=dtype) for dtype in ("bfloat16", "float8"))
    assert 1.2 < wide.seconds / narrow.seconds < 2.4
    assert "gemm.float8.efficiency" in narrow.constants


def test_a_law_of_steady_clocks_is_not_slowed_down_twice() -> None:
    hardware = load_hardware("h100")
    sustained = estimate_gemm(hardware, 8192, 8192, 8192, dtype="float8", regime="sustained")
    tiles = (8192 // 128) * (8192 // 256) / 132
    waves = 0.6 * tiles + 0.4 * 16
    expected = 4.7e-6 + waves * 2 * 128 * 256 * (8192 + 444) / (1979e12 / 132 * 0.72)
    assert sustained.seconds == pytest.approx(expected)
    assert "derate.sustained" not in sustained.constants


def test_a_format_without_a_law_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a100.toml: there is no gemm.float8\n\nhint: there is bfloat16"):
        estimate_gemm(load_hardware("a100"), 512, 512, 512, dtype="float8")
    assert not load_hardware("a100").has_gemm("float8")
    assert load_hardware("h100").has_gemm("float16")


def test_the_same_question_is_answered_once() -> None:
    hardware = load_hardware("h100")
    first: Estimate = estimate_gemm(hardware, 777, 777, 777)
    assert estimate_gemm(hardware, 777, 777, 777) is first
