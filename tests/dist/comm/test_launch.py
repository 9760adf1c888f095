"""Ranks end together and say why, leave nothing behind, and stay up after an error that all of them raised in step.

Each failure takes ranks of its own, which is why there are few of these tests.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.comm import collectives
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.comm.process import build_environment
from plait.errors import ConfigError, TransportError, TransportTimeout
from plait.sharding import MeshShape, build_split

TIMEOUT_S = 5.0
PATIENCE_S = TIMEOUT_S + 30.0
"""Timeout, grace and ending, on a busy machine."""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRanks]:
    """Two ranks to be spoilt, whose files are in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LocalRanks(2, timeout_s=TIMEOUT_S, device_type="cpu") as ranks:
        yield ranks


def meet(how: str) -> int:
    """All ranks sum once; then rank 1 does something else, and the others sum again."""
    axis = build_mesh(MeshShape(tp=dist.get_world_size())).tp
    collectives.all_reduce(torch.ones(2), axis, label="first")
    if axis.rank == 1:
        match how:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("boom")
            case "exit":
                sys.exit(3)
            case "refuse":
                raise ConfigError("no such file", hint="look")
            case "hang":
                while True:
                    pass
            case "differ":
                collectives.all_gather(torch.ones(1), axis, build_split(2, 2), label="other")
    collectives.all_reduce(torch.ones(4), axis, label="second")
    return os.getpid()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_nothing_is_left(pids: list[int], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))
    assert list(folder.iterdir()) == []


def fail(ranks: LocalRanks, how: str) -> TransportError:
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        ranks.call(meet, how=how)
    assert time.monotonic() - start < PATIENCE_S
    return caught.value


def test_a_rank_that_dies_ends_the_others_and_leaves_nothing(fresh, tmp_path):
    pids = fresh.call(meet, how="join")
    error = fail(fresh, "die")
    assert error.message.startswith("rank 1 (tp=1) died: killed by SIGKILL\n")
    assert "last collective #1 on tp: all_reduce [2] float32 over tp (first)" in error.message
    assert "last collective #2 on tp: all_reduce [4] float32 over tp (second)" in error.message
    assert_nothing_is_left(pids, tmp_path)
    with pytest.raises(TransportError, match=r"these 2 ranks were ended: rank 1 \(tp=1\) died"):
        fresh.call(meet, how="join")


def test_a_rank_that_hangs_is_named_as_absent_within_the_timeout(fresh, tmp_path):
    pids = fresh.call(meet, how="join")
    error = fail(fresh, "hang")
    assert isinstance(error, TransportTimeout)
    assert error.message.startswith("rank 1 (tp=1) did not come: rank 0 (tp=0) waited in #2 on tp")
    assert "Timed out waiting" in error.message
    assert_nothing_is_left(pids, tmp_path)


def test_ranks_that_issue_different_collectives_are_reported_first(fresh):
    error = fail(fresh, "differ")
    heading = error.message.splitlines()[0]
    assert heading.startswith("ranks issued different collectives: #2 on tp is, on ")
    assert "rank 1 (tp=1): all_gather [2] float32 over tp (other)" in heading
    assert "rank 0 (tp=0): all_reduce [4] float32 over tp (second)" in heading


def test_a_rank_that_raises_is_the_cause_and_its_traceback_is_shown(fresh):
    error = fail(fresh, "raise")
    assert error.message.startswith("rank 1 (tp=1) raised ValueError: boom\n")
    assert 'raise ValueError("boom")' in error.message
    assert "worker.py" not in error.message


def test_an_error_on_purpose_of_one_rank_keeps_its_type_and_ends_the_others(fresh):
    with pytest.raises(ConfigError, match=r"rank 1 \(tp=1\): no such file\n\nhint: look"):
        fresh.call(meet, how="refuse")
    assert fresh.failure is not None


def raise_on_all(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigError("no such file", hint="look"), ConfigError, r"^no such file\n\nhint: look$"),
        (ValueError("boom"), TransportError, "^rank 0.*, rank 1.* raised ValueError: boom"),
        (SystemExit(3), TransportError, "raised SystemExit: 3"),
    ],
)
def test_an_error_that_all_ranks_raise_in_step_is_raised_once_and_the_ranks_stay_up(ranks, error, kind, message):
    pool = ranks(2)
    pids = pool.call(meet, how="join")
    with pytest.raises(kind, match=message):
        pool.call(raise_on_all, error=error)
    assert pool.call(meet, how="join") == pids


def test_what_cannot_be_sent_is_refused_before_any_rank_sees_it(ranks):
    pool = ranks(2)
    with pytest.raises(ConfigError, match="cannot be sent to the ranks"):
        pool.call(lambda: None)
    with pytest.raises(ConfigError, match="cannot be sent to the ranks"):
        pool.call(meet, how=lambda: None)
    assert len(pool.call(meet, how="join")) == 2


def return_a_lambda() -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error_of_the_rank(ranks):
    with pytest.raises(TransportError, match="raised .*pickle"):
        ranks(2).call(return_a_lambda)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match="^0 ranks cannot be started"):
        LocalRanks(0)


def describe_surroundings() -> tuple[int, str, str]:
    return torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"], str(signal.getsignal(signal.SIGINT))


def test_a_rank_has_one_thread_the_loopback_interface_and_leaves_ctrl_c_to_its_launcher(ranks):
    threads, interface, handler = ranks(2).call(describe_surroundings)[0]
    assert threads == int(os.environ.get("OMP_NUM_THREADS", "1"))
    assert interface == "lo"
    assert handler == str(signal.SIG_IGN)


def test_the_surroundings_of_ranks_are_not_those_of_the_launcher():
    ours = {"PATH": "/bin", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "3"}
    theirs = build_environment(ours)
    assert theirs == {"PATH": "/bin", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "3"}
    assert ours["GLOO_SOCKET_IFNAME"] == "eth0"
    assert build_environment({})["OMP_NUM_THREADS"] == "1"


SCRIPT = """
import os, signal, sys, time
from plait.comm.launch import LocalRanks

# A shell starts what it puts into the background with Ctrl-C ignored, and this test may have been.
signal.signal(signal.SIGINT, signal.default_int_handler)

def speak(number):
    sys.stdout.write(f"rank of process {os.getpid()} got {number}\\n")
    sys.stdout.flush()
    while number == 2:
        time.sleep(0.1)
    return number

if __name__ == "__main__":
    with LocalRanks(2, timeout_s=60, device_type="cpu") as ranks:
        assert ranks.call(speak, number=1) == [1, 1]
        assert "torch" not in sys.modules
        ranks.call(speak, number=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_interrupted_or_killed_takes_its_ranks_along(tmp_path, number):
    """The ranks run functions of the script itself, print as they go, and leave neither processes nor files."""
    script, folder = tmp_path / "script.py", tmp_path / "files"
    script.write_text(SCRIPT)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(4)]
        launcher.send_signal(number)
        launcher.wait(PATIENCE_S)
    assert sorted(line.split()[-1] for line in lines) == ["1", "1", "2", "2"]
    assert_nothing_is_left([int(line.split()[3]) for line in lines], folder)
    assert launcher.returncode == -number


UNGUARDED = """
from plait.comm.launch import LocalRanks

def answer():
    return 1

with LocalRanks(2, timeout_s=60, device_type="cpu") as ranks:
    ranks.call(answer)
"""


@pytest.mark.parametrize(
    ("is_file", "problem"),
    [(True, "starts local ranks when it is imported"), (False, "was not defined in a file")],
    ids=["without a guard", "from stdin"],
)
def test_a_script_that_the_ranks_cannot_import_is_told_how_to_be_one(tmp_path, is_file, problem):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(script) if is_file else "-"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=UNGUARDED,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    error = next(line for line in done.stderr.splitlines() if line.startswith("plait.errors"))
    assert error.startswith("plait.errors.ConfigError: ")
    assert problem in error
