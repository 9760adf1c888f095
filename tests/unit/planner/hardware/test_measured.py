"""What `plait bench calibrate` writes is what `--hardware measured` reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from plait.planner.hardware import MeasuredRates, Provenance, load_hardware, measured_path, save_measured

RATES = MeasuredRates(
    title='a "box" \\ of\nmine',
    date="2026-11-30",
    num_multiprocessors=1,
    capacity_bytes=16_000_000_000,
    gemm_flops_per_s={"float32": 6.1e10},
    gemm_launch_s=7e-6,
    bytes_per_s=1.8e10,
    kernel_launch_s=5e-6,
    lines={"all_gather": {2: ((9e-4, 7.5e8),), 4: ((4e-3, 3e8), (8e-3, 5e8))}},
)


def test_measured_rates_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_measured(measured_path(), RATES, based_on="cpu")
    here = load_hardware("measured")
    assert here.title == "a  box    of mine"
    assert here.peak("float32").value == pytest.approx(6.1e10)
    assert here.peak("float32").provenance is Provenance.MEASURED
    assert here.gemm("float32").launch_s.value == pytest.approx(7e-6)
    assert here.memory.bytes_per_s.value == pytest.approx(1.8e10)
    assert here.memory.capacity_bytes.value == 16e9
    assert here.links.lines["all_gather"][4].pieces == (
        (pytest.approx(4e-3), pytest.approx(3e8)),
        (pytest.approx(8e-3), pytest.approx(5e8)),
    )
    assert here.constants["collectives.all_reduce.2"].confidence == "illustrative"


def test_a_machine_measured_again_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for rate in (1e10, 2e10):
        save_measured(measured_path(), replace(RATES, gemm_flops_per_s={"float32": rate}), based_on="cpu")
        assert load_hardware("measured").peak("float32").value == rate
