"""A rank that fails in the middle of attention is named, and nobody hangs. Each test spoils its ranks."""

import os
import signal
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from plait.comm.launch import LocalRanks
from plait.contract.context.mask import AttentionMask
from plait.errors import TransportError
from plait.parallel.context import ring
from plait.parallel.context.context import build_context
from tests.support.context_attention import Case, build_axis

TIMEOUT_S = 5.0
PATIENCE_S = TIMEOUT_S + 25.0
"""Timeout, grace and ending, on a busy machine."""


@pytest.fixture
def fresh() -> Iterator[LocalRanks]:
    with LocalRanks(3, timeout_s=TIMEOUT_S, device_type="cpu") as ranks:
        yield ranks


def run(where: str, how: str) -> str:
    """Rank 1 does something else when it computes its second block of one pass."""
    axis = build_axis(3)
    work = ring._Forward if where == "forward" else ring._Backward
    attend, num_computed = work.attend, 0

    def attend_until(self: ring._Pass, owner: int) -> None:
        nonlocal num_computed
        num_computed += 1
        if num_computed == 2 and axis.rank == 1:
            match how:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    time.sleep(3 * PATIENCE_S)
        attend(self, owner)

    with patch.object(work, "attend", attend_until):
        Case(AttentionMask(), dtype=torch.float32).run_sharded(build_context(axis, 23))
    return "done"


def fail(ranks: LocalRanks, where: str, how: str) -> TransportError:
    ranks.call(run, where=where, how="not at all")
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        ranks.call(run, where=where, how=how)
    assert time.monotonic() - start < PATIENCE_S
    return caught.value


def test_a_rank_that_dies_in_backward_ends_the_others_with_an_error_that_names_it(fresh):
    error = fail(fresh, "backward", "die")
    assert error.message.startswith("rank 1 (tp=1) died: killed by SIGKILL\n")
    assert "ring [23x2x2x2x8] float32 over cp (here: dk, dv)" in error.message


def test_a_rank_that_hangs_in_forward_is_named_within_the_timeout(fresh):
    error = fail(fresh, "forward", "hang")
    assert error.message.startswith("rank 1 (tp=1) did not come: ")
    assert "ring [23x2x2x2x8] float32 over cp (here: k, v)" in error.message
