"""Shared memory: every pass of a linear by every method that it can execute, and what is sent for it."""

import gc
import os
import random
import re
import resource
import time
from pathlib import Path
from signal import SIGKILL

import pytest
import torch

from plait.comm.launch import LocalRanks
from plait.comm.mesh import Axis, build_mesh
from plait.comm.shared.arena import FOLDER, NoRoom
from plait.errors import ScheduleError, TransportError
from plait.overlap.transport.shm import SharedMemoryTransport, describe_lack
from plait.schedule.piece import build_pieces
from plait.schedule.step import Content, Flow, Message, Method, Step
from plait.sharding import Kind, MeshShape, build_split
from tests.support.collective_gemm import Case, list_cases, list_runs, run_case, run_every
from tests.support.lone_mesh import build_lone_mesh

METHODS = SharedMemoryTransport.capability.methods


def build_axis(degree: int) -> Axis:
    return build_mesh(MeshShape(tp=degree), shared_memory=True).tp


def list_own_runs(num_rows: int, degree: int, chunks: tuple[int, ...]) -> list[tuple[Case, Method, int]]:
    return [run for run in list_runs(num_rows, degree, chunks) if run[1] in METHODS]


def run_in_and_out_of_inference_mode(degree: int) -> None:
    transport = SharedMemoryTransport(build_axis(degree))
    for is_inference in (True, False):
        for case, method, chunks in list_own_runs(7, degree, (3,)):
            with torch.inference_mode(is_inference):
                assert run_case(case, method, chunks, transport).wrong == []


def test_memory_that_is_first_used_in_inference_mode_serves_outside_it(ranks) -> None:
    ranks(2).call(run_in_and_out_of_inference_mode, degree=2)


def run_all(degree: int, num_rows: int, chunks: tuple[int, ...]) -> int:
    """Every pass with every method."""
    return run_every(SharedMemoryTransport(build_axis(degree)), list_own_runs(num_rows, degree, chunks))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 12])
def test_every_pass_by_every_method_is_the_dense_one_and_sends_what_its_schedule_says(ranks, degree, num_rows):
    numbers = ranks(degree).call(run_all, degree=degree, num_rows=num_rows, chunks=(1, 3))
    assert len(set(numbers)) == 1
    assert numbers[0] > (20 if num_rows else 10)


def run_late(num_turns: int) -> None:
    axis = build_axis(2)
    transport = SharedMemoryTransport(axis)
    for channel in (axis.shared.gather, axis.shared.reduce):
        channel.number = num_turns
    for case, method, chunks in list_own_runs(7, 2, (3,)):
        run = run_case(case, method, chunks, transport)
        assert run.wrong == [], (run.wrong, case, method, chunks)


def test_a_long_run_does_not_come_to_the_end_of_the_flags(ranks) -> None:
    """A model of twelve layers takes 72 turns a step."""
    ranks(2).call(run_late, num_turns=72 * 10_000_000)


def reserve_too_many_rows() -> str | None:
    transport = SharedMemoryTransport(build_axis(2))
    return transport.reserve(Flow("x", Kind.ALL_GATHER, build_split(1 << 24, 2)), 1, torch.float32, "here")


def test_more_rows_than_a_flag_counts_are_moved_otherwise(ranks) -> None:
    assert ranks(2).call(reserve_too_many_rows) == ["its flags count up to 16777215 rows, and there are 16777216"] * 2


class Sleeper:
    """Sleeps after some steps, most often shortly, so that now one rank is far ahead and now the other."""

    def __init__(self, rank: int, longest_s: float) -> None:
        self._random, self._longest_s = random.Random(rank), longest_s

    def note(self, step: Step, start_s: float, end_s: float) -> None:
        if self._random.random() < 0.1:
            time.sleep(self._random.random() ** 2 * self._longest_s)


def run_with_pauses(degree: int, sizes: tuple[int, ...], num_runs: int, longest_s: float) -> int:
    """Passes in any order, sizes in any order; nothing may be read too early or overwritten too soon."""
    axis = build_axis(degree)
    transport = SharedMemoryTransport(axis)
    sleeper = Sleeper(axis.rank, longest_s)
    runs = [run for num_rows in sizes for run in list_own_runs(num_rows, degree, (1, 4))]
    drawn = random.Random(5).choices(runs, k=num_runs)
    for case, method, chunks in drawn:
        run = run_case(case, method, chunks, transport, observer=sleeper)
        assert run.wrong == [], (run.wrong, case, method, chunks)
    return len(drawn)


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("sizes", [(3, 12, 90), (1, 2)], ids=["all_have_rows", "some_have_none"])
def test_ranks_that_are_far_ahead_or_behind_change_nothing(ranks, degree: int, sizes: tuple[int, ...]) -> None:
    """A rank whose rows nobody needs, as it has none, is one that nobody waits for."""
    done = ranks(degree).call(run_with_pauses, degree=degree, sizes=sizes, num_runs=300, longest_s=0.02)
    assert done == [300] * degree


def use_and_drop() -> list[str]:
    transport = SharedMemoryTransport(build_axis(2))
    for case, method, chunks in list_own_runs(7, 2, (3,)):
        assert run_case(case, method, chunks, transport).wrong == []
    gc.collect()
    gc.disable()
    del transport
    left = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{FOLDER}/plait-" in line]
    gc.enable()
    return left


def test_memory_goes_with_the_transport_and_its_axis(ranks) -> None:
    assert ranks(2).call(use_and_drop) == [[], []]


def read_while_others_grow() -> None:
    transport = SharedMemoryTransport(build_axis(2))
    rank = transport.axis.rank
    flow = Flow("x", Kind.ALL_GATHER, build_split(4, 2))
    # Rank 1 reads late what was gathered, while rank 0 goes on to runs for which the memory is too small.
    for width in (10, 10_000, 20_000, 40_000):
        session = transport.open_gather(flow, torch.full((2, width), width + rank), "here")
        session.collect()
        time.sleep(0.3 * rank)
        assert session.full[:, 0].tolist() == [width, width, width + 1, width + 1]


def test_memory_that_is_still_read_is_not_given_back(ranks) -> None:
    ranks(2).call(read_while_others_grow)


def gather_others(widths: tuple[int, ...], label: str) -> None:
    axis = build_axis(len(widths))
    flow = Flow("x", Kind.ALL_GATHER, build_split(6, axis.degree))
    transport = SharedMemoryTransport(axis)
    shard = torch.ones(flow.split.lengths[axis.rank], widths[axis.rank])
    transport.open_gather(flow, shard, f"{label}{axis.rank if label else ''}").collect()


@pytest.mark.parametrize(("widths", "label"), [((3, 4), ""), ((3, 4000), ""), ((3, 3), "layers.")])
def test_ranks_that_move_something_else_are_told_so(ranks, widths: tuple[int, int], label: str) -> None:
    with pytest.raises(TransportError, match=r"all_gather x .*: \[0:3, 3:6\] x 3 torch.float32 here, but all_gather x"):
        ranks(2).call(gather_others, widths=widths, label=label)


def send_out_of_order() -> None:
    axis = build_axis(2)
    flow = Flow("x", Kind.ALL_GATHER, build_split(6, 2))
    session = SharedMemoryTransport(axis).open_gather(flow, torch.ones(3, 1), "here")
    last = build_pieces(flow.split, 3).find(axis.rank, 2)
    assert last is not None
    session.send(Message("x", Content.VALUE, last, axis.rank, 1 - axis.rank, 0))


def test_a_flag_cannot_skip_rows(ranks) -> None:
    """It says that all rows up to some can be read."""
    with pytest.raises(ScheduleError, match=r"here: x\[2:3\] was sent before the rows ahead of it"):
        ranks(2).call(send_out_of_order)


def run_out_of_memory() -> tuple[str | None, str]:
    transport = SharedMemoryTransport(build_axis(2))
    flows = [Flow("y", kind, build_split(1000, 2)) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)]
    shard = torch.full((500, 3000), 1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
    try:
        with pytest.raises(NoRoom) as caught:
            transport.open_gather(flows[0], shard, "here")
        reason = transport.reserve(flows[1], 3000, torch.float32, "here")
        assert transport.reserve(flows[1], 3000, torch.float32, "here") == reason
        assert transport.reserve(flows[0], 10, torch.float32, "here") is None
        session = transport.open_gather(flows[0], shard[:, :10], "here")
        session.collect()
        assert session.full.eq(1).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    session = transport.open_gather(flows[0], shard[:, :20], "here")
    session.collect()
    assert session.full.shape == (1000, 20)
    assert session.full.eq(1).all()
    return reason, caught.value.message


def test_all_ranks_are_told_before_anything_moves_that_there_is_no_memory(ranks) -> None:
    for reason, message in ranks(2).call(run_out_of_memory):
        assert reason is not None
        assert re.fullmatch(r"50.3 MB of shared memory are needed, but /dev/shm has .* left", reason)
        assert re.search(r"failed: 25.2 MB of shared memory are needed, but /dev/shm has .* left", message)


def die_in_a_gemm() -> None:
    transport = SharedMemoryTransport(build_axis(2))
    case = next(case for case in list_cases(12, 2) if case.direction == "backward")
    for step in range(5):
        if step == 4 and transport.axis.rank == 1:
            os.kill(os.getpid(), SIGKILL)
        run_case(case, Method.DIRECT, 3, transport, label="layers.0")


def test_a_rank_that_is_killed_is_named() -> None:
    with LocalRanks(2, timeout_s=60, device_type="cpu") as ranks:
        pids, start = ranks.call(os.getpid), time.monotonic()
        with pytest.raises(TransportError, match="rank 1 .*died: killed by SIGKILL") as caught:
            ranks.call(die_in_a_gemm)
        assert time.monotonic() - start < 8
    assert re.search(r"reduce_scatter .*layers.0.* failed: rank 1 has died", str(caught.value))
    assert [path for pid in pids for path in FOLDER.glob(f"plait-{pid}-*")] == []


def reason_without() -> str | None:
    return describe_lack(build_mesh(MeshShape(tp=2)).tp)


def test_who_has_no_shared_memory_says_why(ranks) -> None:
    assert ranks(2).call(reason_without) == ["it was not asked for"] * 2
    assert describe_lack(build_lone_mesh(1).tp) == "it was not asked for"
    lone = build_lone_mesh(1)
    lone.share_memory()
    assert describe_lack(lone.tp) == "it has one rank"
