"""Shared memory: every pass of a linear by every method that it can execute, and what is sent for it."""

import random
import time
from typing import Any

import pytest

from plait.comm import trace
from plait.comm.mesh import Axis, build_mesh
from plait.overlap.transport.shm import SharedMemoryTransport
from plait.schedule.step import Method, Step
from plait.sharding import MeshShape
from tests.support.collective_gemm import Case, list_runs, run_case

METHODS = SharedMemoryTransport.capability.methods


def build_axis(degree: int) -> Axis:
    return build_mesh(MeshShape(tp=degree), shared_memory=True).tp


def list_own_runs(num_rows: int, degree: int, chunks: tuple[int, ...]) -> list[tuple[Case, Method, int]]:
    return [run for run in list_runs(num_rows, degree, chunks) if run[1] in METHODS]


def run_all(degree: int, num_rows: int, chunks: tuple[int, ...]) -> int:
    """Every pass with every method; the number of runs, all of which gave the dense result and sent what was said."""
    transport = SharedMemoryTransport(build_axis(degree))
    number = 0
    for case, method, chunks_of_run in list_own_runs(num_rows, degree, chunks):
        with trace.record() as recorded:
            run = run_case(case, method, chunks_of_run, transport, label="here")
        where = (case, method, chunks_of_run)
        assert run.wrong == [], (run.wrong, *where)
        if method is not Method.NONE:
            assert moved(recorded, "sent") == run.program.messages_sent, where
            assert moved(recorded, "received") == run.program.messages_received, where
        assert [entry.kind for entry in recorded.collectives] == [flow.kind for flow in run.program.flows], where
        number += 1
    return number


def moved(recorded: trace.Trace, direction: str) -> list[Any]:
    return [entry.message for entry in recorded.moved if entry.direction == direction]


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 12])
def test_every_pass_by_every_method_is_the_dense_one_and_sends_what_its_schedule_says(ranks, degree, num_rows):
    numbers = ranks(degree).call(run_all, degree=degree, num_rows=num_rows, chunks=(1, 3))
    assert len(set(numbers)) == 1
    assert numbers[0] > (20 if num_rows else 10)


class Sleeper:
    """Sleeps after some steps, most often shortly, so that now one rank is far ahead and now the other."""

    def __init__(self, rank: int, longest_s: float) -> None:
        self._random, self._longest_s = random.Random(rank), longest_s

    def note(self, step: Step, start_s: float, end_s: float) -> None:
        if self._random.random() < 0.1:
            time.sleep(self._random.random() ** 2 * self._longest_s)


def run_with_pauses(degree: int, seed: int, num_runs: int, longest_s: float) -> int:
    """Passes in any order, sizes in any order; nothing may be read too early or overwritten too soon."""
    axis = build_axis(degree)
    transport = SharedMemoryTransport(axis)
    sleeper = Sleeper(axis.rank, longest_s)
    runs = [run for num_rows in (3, 12, 90) for run in list_own_runs(num_rows, degree, (1, 4))]
    drawn = random.Random(seed).choices(runs, k=num_runs)
    for case, method, chunks in drawn:
        run = run_case(case, method, chunks, transport, observer=sleeper)
        assert run.wrong == [], (run.wrong, case, method, chunks)
    return len(drawn)


@pytest.mark.parametrize("degree", [2, 3])
def test_ranks_that_are_far_ahead_or_behind_change_nothing(ranks, degree: int) -> None:
    assert ranks(degree).call(run_with_pauses, degree=degree, seed=5, num_runs=300, longest_s=0.02) == [300] * degree
