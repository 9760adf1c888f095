"""Overlap: the schedule's time derated by one gain, within the conditions that are stated for it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config.overlap import OverlapConfig
from plait.planner.step.overlap import Gain, Pass, time_pass
from plait.schedule.work import Operation
from plait.sharding import Partial, Replicate, Shard, derive_transition

_GAIN = Gain(0.65, 0.3e-3)
_AUTO = OverlapConfig(policy="auto")


def _build_pass(*, gemm_s: float, move_s: float, operation: Operation = Operation.COLUMN_FORWARD) -> Pass:
    is_row = operation is Operation.ROW_FORWARD
    return Pass(
        operation,
        derive_transition(Partial(), Shard(0)) if is_row else derive_transition(Shard(0), Replicate()),
        8192,
        8,
        {"forward": lambda rows: gemm_s * rows / 8192},
        {"y" if is_row else "x": move_s},
        10e-6,
        0.0,
    )


def test_a_gather_hides_beneath_the_gemm_as_far_as_the_gain_goes() -> None:
    one = _build_pass(gemm_s=2e-3, move_s=1e-3)
    timed = time_pass(one, _AUTO, _GAIN)
    # Own rows are there at once and what comes is hidden, so the ideal is the GEMM alone.
    assert timed.simulated_s == pytest.approx(2e-3)
    assert timed.seconds == pytest.approx(3e-3 - 0.65 * 1e-3)
    assert timed.schedule == "direct"


def test_three_latencies_stay_exposed() -> None:
    assert time_pass(_build_pass(gemm_s=2e-3, move_s=30e-6), _AUTO, _GAIN).seconds == pytest.approx(2.03e-3)
    assert time_pass(_build_pass(gemm_s=2e-3, move_s=40e-6), _AUTO, _GAIN).seconds == pytest.approx(2.03e-3)


def test_short_gemms_hide_no_sums_but_gathers() -> None:
    row = _build_pass(gemm_s=0.2e-3, move_s=0.2e-3, operation=Operation.ROW_FORWARD)
    assert time_pass(row, _AUTO, _GAIN).seconds == pytest.approx(0.4e-3)
    column = _build_pass(gemm_s=0.2e-3, move_s=0.2e-3)
    assert time_pass(column, _AUTO, _GAIN).seconds < 0.35e-3


def test_policies_that_overlap_nothing_are_serial() -> None:
    one = _build_pass(gemm_s=2e-3, move_s=1e-3)
    for overlap in (OverlapConfig(policy="disabled"), OverlapConfig(policy="full", method="none")):
        assert time_pass(one, overlap, _GAIN).seconds == pytest.approx(3e-3)


@given(st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-2), st.sampled_from(Operation), st.integers(1, 8))
def test_auto_is_never_slower_than_serial_nor_better_than_the_gain(
    gemm_s: float, move_s: float, operation: Operation, chunks: int
) -> None:
    one = _build_pass(gemm_s=gemm_s, move_s=move_s)
    if operation is Operation.ROW_FORWARD:
        one = _build_pass(gemm_s=gemm_s, move_s=move_s, operation=operation)
    overlap = OverlapConfig(policy="auto", chunks=chunks)
    timed = time_pass(one, overlap, _GAIN)
    assert timed.seconds <= one.serial_s
    assert timed.seconds >= one.serial_s - 0.65 * min(gemm_s, move_s) - 1e-12


@given(st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-2), st.floats(1, 10))
def test_a_faster_collective_is_never_slower(gemm_s: float, move_s: float, factor: float) -> None:
    slow = _build_pass(gemm_s=gemm_s, move_s=move_s + 10e-6)
    fast = replace(slow, move_s={"x": move_s / factor + 10e-6})
    assert time_pass(fast, _AUTO, _GAIN).seconds <= time_pass(slow, _AUTO, _GAIN).seconds * (1 + 1e-9)
