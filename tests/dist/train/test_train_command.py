"""`plait train` on ranks that it starts itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.training import save_tokens

CONFIG = """
name = "nano"
[model]
preset = "llama-tiny"
[parallel]
tp = 2
[precision]
compute = "float32"
[data]
kind = "tokens"
paths = ["tokens.npy"]
[train]
steps = 1_000_000
seq_len = 16
"""

PATIENCE_S = 120
"""For two ranks to start on a busy machine."""


@pytest.fixture
def process(tmp_path: Path) -> "subprocess.Popen[str]":
    """The command, some steps into a run that would not end by itself."""
    (tmp_path / "nano.toml").write_text(CONFIG)
    save_tokens(tmp_path)
    command = [sys.executable, "-m", "plait", "train", "nano.toml"]
    process = subprocess.Popen(
        command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    metrics = tmp_path / "runs" / "nano" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("whole_terminal", [False, True], ids=["SIGTERM to the command", "Ctrl-C in a terminal"])
def test_a_stopped_command_saves_its_step_and_ends_with_status_0(
    process: "subprocess.Popen[str]", tmp_path: Path, whole_terminal: bool
) -> None:
    if whole_terminal:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["was_stopped"] is True
    assert f"asked to stop: saving step {summary['step']}" in err
    assert (tmp_path / summary["checkpoint"] / "index.json").is_file()
    steps = (tmp_path / summary["metrics"]).read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == list(range(1, summary["step"] + 1))
