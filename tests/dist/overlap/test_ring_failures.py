"""A rank that fails in the middle of an overlapped GEMM is named, and nobody hangs. Each test spoils its ranks."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.errors import TransportError, TransportTimeout
from plait.overlap.execute import Addends, execute
from plait.overlap.transport.ring import RingTransport
from plait.schedule.program import build_program
from plait.schedule.step import Method
from plait.sharding import Interval, MeshShape
from tests.support.collective_gemm import Case

TIMEOUT_S = 5.0
PATIENCE_S = TIMEOUT_S + 15.0
"""Timeout, grace and ending, on a busy machine."""


@pytest.fixture
def fresh() -> Iterator[LocalRanks]:
    with LocalRanks(3, timeout_s=TIMEOUT_S, device_type="cpu") as ranks:
        yield ranks


def run(method: Method, how: str) -> str:
    """Rank 1 does something else in the middle of its GEMM, or all do."""
    axis = build_mesh(MeshShape(tp=3)).tp
    num_computed = 0

    def forward(rows: Interval, full: Tensor | None, partial: Tensor, *, accumulates: bool) -> None:
        nonlocal num_computed
        num_computed += 1
        partial[rows.start : rows.stop] = 1.0
        if num_computed == 2 and how == "raise together":
            raise ValueError("boom")
        if num_computed == 2 and axis.rank == 1:
            match how:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "raise":
                    raise ValueError("boom")
                case "hang":
                    time.sleep(3 * PATIENCE_S)

    program = build_program(Case("row", "forward", True, 12, 3).work, method, 2, axis.rank)
    addends = Addends(1 << 18, torch.float32, torch.device("cpu"))
    execute(program, RingTransport(axis), gemms={"forward": forward}, addends=addends, label="w_down")
    return "done"


def fail(ranks: LocalRanks, method: Method, how: str) -> TransportError:
    ranks.call(run, method=method, how="not at all")
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        ranks.call(run, method=method, how=how)
    assert time.monotonic() - start < PATIENCE_S
    return caught.value


@pytest.mark.parametrize("method", [Method.DIRECT, Method.RING])
def test_a_rank_that_dies_is_named_and_so_is_the_message_that_did_not_come(fresh, method):
    error = fail(fresh, method, "die")
    assert error.message.startswith("rank 1 (tp=1) died: killed by SIGKILL\n")
    assert " in #2 on tp: reduce_scatter [12x262144] float32 over tp (w_down) failed: " in error.message


def test_a_rank_that_hangs_is_named_within_the_timeout(fresh):
    error = fail(fresh, Method.DIRECT, "hang")
    assert isinstance(error, TransportTimeout)
    assert error.message.startswith("rank 1 (tp=1) did not come: ")
    assert "Timed out waiting" in error.message


def test_a_rank_that_raises_is_the_cause(fresh):
    error = fail(fresh, Method.RING, "raise")
    assert error.message.startswith("rank 1 (tp=1) raised ValueError: boom\n")


def run_after_failure() -> str:
    with suppress(ValueError):
        run(Method.DIRECT, "raise together")
    try:
        run(Method.DIRECT, "not at all")
    except TransportError as error:
        return error.message
    return "garbage"


def test_after_a_run_left_in_the_middle_there_is_no_other_and_the_ranks_can_leave(fresh):
    for message in fresh.call(run_after_failure):
        assert message.startswith("an earlier run was left in the middle: addend y[")
    start = time.monotonic()
    fresh.close()
    assert time.monotonic() - start < TIMEOUT_S
