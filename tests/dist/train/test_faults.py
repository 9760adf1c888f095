"""Whatever happens to a rank of `plait train`: it is named, nothing is left behind, and the run goes on if it may.

The ranks are those that the command starts itself, and fail where `tests.support.faults` lets them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from plait.cli import train as train_command
from plait.cli.main import main
from plait.config.run import RunConfig
from tests.support.faults import plan_fault, train_badly
from tests.support.training import read_losses, save_tokens

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 30.0
# How GEMMs are cut is said, as the cost model may choose otherwise after a restart, and rounding with it.
CONFIG = f"""
name = "nano"
[model]
preset = "llama-tiny"
vocab_size = 67
[parallel]
tp = 2
[overlap]
policy = "full"
transport = "shm"
method = "direct"
chunks = 1
[precision]
compute = "float32"
[data]
kind = "tokens"
paths = ["tokens.npy"]
[train]
steps = 7
seq_len = 16
checkpoint_every = 2
timeout_s = {TIMEOUT_S}
"""


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str
    folder: Path

    @property
    def run(self) -> RunConfig:
        from plait.config.load import load_run_config

        return load_run_config(str(self.folder / "nano.toml"), [f"out_dir={self.folder / 'runs'}"])

    @property
    def losses(self) -> list[tuple[int, float, float]]:
        return read_losses(self.run)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_command, "train_rank", train_badly)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of the run when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(folder)
    command = [sys.executable, "-m", "plait", "train", "nano.toml"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Ended(0, "", "", folder).losses


def prepare(folder: Path) -> None:
    (folder / "nano.toml").write_text(CONFIG)
    (folder / "runs").mkdir()
    save_tokens(folder)


def train(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> Ended:
    with pytest.raises(SystemExit) as ended:
        main(["train", "nano.toml", *overrides])
    assert_nothing_is_left(folder)
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, *capsys.readouterr(), folder)


def assert_nothing_is_left(folder: Path) -> None:
    """No half-written file or folder, and no memory that has a name but nobody who holds it."""
    assert [path for path in folder.rglob(".writing-*") if path.exists()] == []
    named = [path for path in Path("/dev/shm").glob("plait-*") if not Path(f"/proc/{path.name.split('-')[1]}").exists()]
    assert named == []


RESTARTED = [
    ("start", "die", 0, "shm"),
    ("gemm", "die", 1, "shm"),
    ("gemm", "die", 0, "ring"),
    ("gemm", "freeze", 1, "shm"),
    ("loss", "die", 1, "ring"),
    ("save", "die", 0, "shm"),
    ("save", "die", 1, "shm"),
    ("step", "freeze", 0, "ring"),
]


@pytest.mark.parametrize(("where", "what", "rank", "transport"), RESTARTED)
def test_a_run_goes_on_from_its_checkpoint_as_if_nothing_had_happened(
    folder, capsys, undisturbed, where, what, rank, transport
):
    plan_fault(folder / "runs", where, what, rank=rank)
    ended = train(folder, capsys, "train.max_restarts=1", f"overlap.transport={transport}")
    assert ended.status == 0, ended.err
    assert ended.losses == undisturbed
    started, heading, *_ = ended.err.splitlines()
    assert started == "starting 2 ranks"
    happened = "died: killed by SIGKILL" if what == "die" else "did not come: rank"
    assert heading.startswith(f"error: rank {rank}")
    assert happened in heading
    assert sorted(re.findall(r"^  (rank \d)", ended.err, re.MULTILINE)) == ["rank 0", "rank 1"]
    assert ended.err.count("      last collective ") == 2
    assert "restart 1 of 1" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_in_a_save_that_goes_on_meanwhile_loses_that_save_alone(folder, capsys, undisturbed, rank):
    """Of a thread; it may still be that of step 2, or of step 4 already."""
    plan_fault(folder / "runs", "save", "die", rank=rank, at_step=3)
    ended = train(folder, capsys, "train.max_restarts=1", "train.async_checkpoint=true")
    assert ended.status == 0, ended.err
    assert ended.losses == undisturbed
    assert ended.err.startswith(f"starting 2 ranks\nerror: rank {rank} (tp={rank}) died: killed by SIGKILL\n")


def test_without_restarts_one_error_says_what_happened_and_what_is_lost(folder, capsys):
    plan_fault(folder / "runs", "save", "die", rank=0, at_step=3)
    ended = train(folder, capsys)
    assert (ended.status, ended.out) == (3, "")
    assert ended.err.count("error: ") == 1
    assert ended.err.startswith("starting 2 ranks\nerror: rank 0 (tp=0) died: killed by SIGKILL\n")
    assert ended.err.endswith(
        "\n\nhint: step 4 was taken, step 2 is saved, 2 steps are lost; the same command goes on from there\n"
    )


def test_restarts_end_when_they_are_used_up(folder, capsys, monkeypatch):
    """Every rank dies in start-up, again and again."""
    monkeypatch.setattr(train_command, "train_rank", die_always)
    ended = train(folder, capsys, "train.max_restarts=1")
    assert ended.status == 3
    assert ended.err.count("restart 1 of 1") == 1
    assert ended.err.endswith("hint: no step was taken; the same command goes on from there\n")


def die_always(run: RunConfig) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_loss_that_is_not_a_number_is_not_tried_again(folder, capsys):
    plan_fault(folder / "runs", "loss", "nan", rank=0)
    ended = train(folder, capsys, "train.max_restarts=3")
    assert ended.status == 2
    assert ended.err.count("error: ") == 1
    assert "error: training diverged: loss nan" in ended.err
    assert "restart" not in ended.err


def test_a_checkpoint_that_the_disk_refuses_is_not_tried_again_and_the_one_before_stays(folder, capsys):
    plan_fault(folder / "runs", "step", "limit files", rank=0)
    ended = train(folder, capsys, "train.max_restarts=3")
    assert ended.status == 2
    assert ended.err.count("error: ") == 1
    assert "cannot be written (File too large)" in ended.err
    assert [path.name for path in sorted((folder / "runs/nano/checkpoints").iterdir())] == ["step-00000002"]
    again = train(folder, capsys)
    assert again.status == 0, again.err


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of a megabyte and a half in place of the folder of runs."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder / "runs")]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.strip()}")
    yield folder / "runs"
    subprocess.run(["umount", "--lazy", str(folder / "runs")], check=True)


@pytest.mark.parametrize(("every", "file"), [(100, "metrics.jsonl"), (1, "checkpoints")])
def test_a_full_disk_ends_the_run_with_the_name_of_the_file(small_disk, folder, capsys, every, file):
    plan_fault(small_disk, "step", "fill disk", rank=0)
    ended = train(folder, capsys, f"train.checkpoint_every={every}", "train.keep_checkpoints=1")
    assert ended.status == 2
    assert ended.err.count("error: ") == 1
    assert "cannot be written (No space left on device)" in ended.err or "cannot be made" in ended.err
    lines = (small_disk / "nano/metrics.jsonl").read_text().splitlines()
    assert all(line.endswith("}") for line in lines)


def test_a_slow_rank_is_named_and_the_run_goes_on(folder, capfd):
    plan_fault(folder / "runs", "step", "pause", rank=1)
    ended = train(folder, capfd, "train.steps=20", "train.check_pace_every=10")
    assert ended.status == 0, ended.err
    said = [line for line in ended.err.splitlines() if ": slow: " in line]
    assert len(said) == 1
    assert "rank 1 (tp=1) " in said[0]
    assert "they wait for" in said[0]


@pytest.mark.parametrize("when_s", [0.0, 1.5])
def test_a_rank_that_is_killed_while_it_starts_is_replaced(folder, when_s, undisturbed):
    """From outside, before the ranks have met."""
    command = [sys.executable, "-m", "plait", "train", "nano.toml", "train.max_restarts=1"]
    with subprocess.Popen(command, cwd=folder, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        pids = wait_for_ranks(process.pid)
        time.sleep(when_s)
        os.kill(pids[-1], signal.SIGKILL)
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 0, err
    assert "died: killed by SIGKILL" in err
    assert "no step was taken: restart 1 of 1" in err
    assert_nothing_is_left(folder)
    assert Ended(0, "", err, folder).losses == undisturbed


def wait_for_ranks(pid: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        if len(found) == 2:
            return found
        time.sleep(0.02)
    raise AssertionError("no ranks were started")
