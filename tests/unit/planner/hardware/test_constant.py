from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner.hardware import Constant, Provenance
from plait.planner.hardware.constant import USUAL_ERROR, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("312 TFLOP/s", "FLOP/s", 312e12), ("4.9 us", "s", 4.9e-6), (" 3.35TB/s ", "B/s", 3.35e12),
        ("2 GiB", "B", 2**31), (0.88, "1", 0.88), (8, "1", 8.0), ("8 devices", "devices", 8.0),
        ("inf GB/s", "B/s", inf), ("1e3 B", "B", 1000.0),
    ],
)  # fmt: skip
def test_quantities_are_read_in_base_units(text: object, unit: str, expected: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["nan us", "us", "3 s s", "", None, [], "3 GB", "--3 us", "1.2.3 us"])
def test_what_is_not_one_is_described(text: object) -> None:
    assert isinstance(parse_quantity(text, "s"), str)


@pytest.mark.parametrize(("text", "unit"), [("inf GB", "B"), ("inf s", "s"), ("1e400 B", "B"), (float("inf"), "1")])
def test_only_rates_are_infinite(text: object, unit: str) -> None:
    assert "should be a finite number" in str(parse_quantity(text, unit))


@given(st.text(max_size=12))
def test_any_text_is_answered(text: str) -> None:
    assert isinstance(parse_quantity(text, "s"), float | str)


def _constant(provenance: Provenance, error: float | None) -> Constant:
    return Constant("x", 1.0, "1", provenance, "there", "2026-11-30", "high", error)


def test_uncertainty_is_the_error_of_the_fit() -> None:
    assert _constant(Provenance.FITTED, 0.056).uncertainty == 0.056


def test_what_is_assumed_is_never_surer_than_assumptions_are() -> None:
    assert _constant(Provenance.ASSUMED, 0.01).uncertainty == USUAL_ERROR[Provenance.ASSUMED]
    assert _constant(Provenance.ASSUMED, 0.5).uncertainty == 0.5


def test_less_sure_sources_are_less_certain() -> None:
    usual = [_constant(provenance, None).uncertainty for provenance in Provenance]
    assert usual == sorted(usual)
