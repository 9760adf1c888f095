"""Ranks that somebody else started watch each other: none hangs, and one of them reports for all."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.comm import collectives
from plait.comm.board import POLL_S
from plait.comm.environment import detect_launch
from plait.comm.membership import join
from plait.comm.mesh import build_mesh
from plait.errors import ConfigError, PlaitError
from plait.sharding import MeshShape

TIMEOUT_S = 5.0
LIMIT_S = 120.0


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str


def be_rank(how: str, start_timeout_s: float) -> None:
    """One rank: sum once, then rank 1 does something else, and the other sums again; errors as the CLI shows them.

    `hang 0` and the like is for rank 0 to do it.
    """
    how, _, culprit = how.partition(" ")
    try:
        with join(detect_launch(os.environ), TIMEOUT_S, start_timeout_s):
            axis = build_mesh(MeshShape(tp=2)).tp
            collectives.all_reduce(torch.ones(2), axis, label="first")
            if axis.rank == int(culprit or 1) and how != "ok":
                misbehave(how)
            if how == "stop":
                time.sleep(LIMIT_S)
            total = collectives.all_reduce(torch.ones(4), axis, label="second")
        sys.stdout.write(f"{total.tolist()} {dist.is_initialized()}\n")
    except PlaitError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_status)


def misbehave(how: str) -> None:
    match how:
        case "freeze" | "stop":
            time.sleep(4 * POLL_S)  # what it did before has been posted by then
            os.kill(os.getpid(), signal.SIGSTOP)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "refuse":
            raise ConfigError("no such file")
        case "crash":
            raise ValueError("boom")
    while True:
        pass


def start(how: str, ranks: tuple[int, ...] = (0, 1), start_timeout_s: float = LIMIT_S) -> list[Ended]:
    """Run ranks of a world of two as Slurm would start them on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": port,
    }
    code = f"from tests.dist.comm.test_membership import be_rank; be_rank({how!r}, {start_timeout_s})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    return [finish(processes, process) for process in processes]


def finish(all_of_them: list["subprocess.Popen[str]"], process: "subprocess.Popen[str]") -> Ended:
    """Wait for a rank; one that was stopped is killed when all others have ended."""
    others = [other for other in all_of_them if other is not process]
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if is_stopped(process.pid) and all(other.poll() is not None for other in others):
            process.kill()
        time.sleep(0.1)
    output = process.communicate(timeout=LIMIT_S)
    return Ended(process.returncode, *output)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_ranks_that_finish_leave_silently_without_a_process_group():
    assert start("ok") == [Ended(0, "[2.0, 2.0, 2.0, 2.0] False\n", "")] * 2


def test_an_error_on_purpose_ends_both_and_is_said_once():
    waiting, refusing = start("refuse")
    assert (waiting.status, refusing.status) == (2, 2)
    assert waiting.stderr == ""
    assert refusing.stderr == "ConfigError: rank 1 (tp=1): no such file\n"


def test_a_crash_is_reported_with_the_last_collective_of_every_rank():
    waiting, crashed = start("crash")
    assert (waiting.status, crashed.status) == (3, 3)
    assert crashed.stderr.startswith("TransportError: rank 1 (tp=1) raised ValueError: boom\n")
    assert "last collective #2 on tp: all_reduce [4] float32 over tp (second)" in crashed.stderr


def test_a_rank_that_hangs_is_named_and_ended():
    waiting, hanging = start("hang")
    assert (waiting.status, hanging.status) == (3, 3)
    assert waiting.stderr.startswith(
        "TransportTimeout: rank 1 (tp=1) did not come: rank 0 (tp=0) waited in #2"
    )
    assert "last collective #1 on tp: all_reduce [2] float32 over tp (first)" in waiting.stderr


def test_a_rank_that_dies_is_named_by_those_that_lost_it():
    waiting, dead = start("die")
    assert (waiting.status, dead.status) == (3, -signal.SIGKILL)
    assert waiting.stderr.startswith("TransportError: rank 1")
    assert "went away: rank 0 (tp=0) waited in #2" in waiting.stderr


def test_no_traceback_of_those_that_only_noticed():
    assert "Traceback" not in start("die")[0].stderr


def test_a_frozen_rank_is_named_though_no_collective_waits_for_it():
    """Nothing of a stopped process runs, so it gives no sign of life; the others compute and would not notice."""
    waiting, frozen = start("stop")
    assert (waiting.status, frozen.status) == (3, -signal.SIGKILL)
    heading, *rows = waiting.stderr.splitlines()
    assert heading.startswith("error: rank 1 (tp=1) did not come: rank 0 (tp=0) waited in #1")
    assert any("rank 0 (tp=0) raised: TransportTimeout: rank 1 has given no sign of life" in row for row in rows)
    assert sum("last collective #1 on tp: all_reduce [2]" in row for row in rows) == 2


def test_a_frozen_rank_that_holds_the_store_leaves_nobody_waiting():
    frozen, waiting = start("freeze 0")
    assert (waiting.status, frozen.status) == (3, -signal.SIGKILL)
    assert waiting.stderr.startswith("TransportTimeout: rank 1 (tp=1): #2 on tp: all_reduce [4]")
    assert "and the rendezvous store, which rank 0 holds, does not answer for 5 s" in waiting.stderr
    assert "last collective #2 on tp: all_reduce [4]" in waiting.stderr


def test_a_rank_that_dies_with_the_store_is_named_by_each_of_the_others():
    dead, waiting = start("die 0")
    assert (waiting.status, dead.status) == (3, -signal.SIGKILL)
    assert "\nTransportError: rank 1 (tp=1): #2 on tp" in waiting.stderr, "behind what torch logs of the store"
    assert "and the rendezvous store, which rank 0 holds, is gone" in waiting.stderr
    assert "Traceback" not in waiting.stderr


def test_a_rank_that_never_starts_is_named():
    (alone,) = start("ok", ranks=(0,), start_timeout_s=2.0)
    assert alone.status == 3
    assert alone.stderr.startswith("TransportTimeout: rank 1 did not come")
    assert "of 2 ranks, 1 did not come within 2 s" in alone.stderr


def test_a_rendezvous_that_nobody_holds_is_said_where_and_for_how_long():
    (alone,) = start("ok", ranks=(1,), start_timeout_s=2.0)
    assert alone.status == 3
    assert "TransportError: rank 1: no rendezvous at localhost:" in alone.stderr
    assert "within 2 s" in alone.stderr
    assert "Traceback" not in alone.stderr


@pytest.mark.parametrize("host", ["no.such.host.invalid"])
def test_a_host_that_is_not_known_is_refused_at_once(host, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", host)
    (alone,) = start("ok", ranks=(1,))
    assert alone.status == 2
    assert f"ConfigError: rank 1: the host '{host}' is not known" in alone.stderr
