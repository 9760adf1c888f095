"""The recipes for torchrun, run: on one machine, and on two network namespaces as machines."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lives import kill_rank, read_steps, wait_for
from tests.support.source_tree import ROOT
from tests.support.training import save_tokens

LAUNCH = ROOT / "examples" / "launch"
STEPS = 400
CONFIG = f"""
name = "nano"
[model]
preset = "llama-tiny"
vocab_size = 67
[parallel]
tp = 2
[precision]
compute = "float32"
[data]
kind = "tokens"
paths = ["tokens.npy"]
[train]
steps = {STEPS}
seq_len = 16
checkpoint_every = 4
timeout_s = 60.0
"""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("bash") is None, reason="the recipes are bash scripts"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nano.toml").write_text(CONFIG)
    save_tokens(tmp_path)
    return tmp_path


def build_environ(**variables: str) -> dict[str, str]:
    """That of this process, in which torchrun is that of this interpreter."""
    beside = str(Path(sys.executable).parent)
    path = f"{beside}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **variables}


def start_one_node(folder: Path, *overrides: str, max_restarts: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [LAUNCH / "one_node.sh", "nano.toml", *overrides],
        cwd=folder, env=build_environ(RANKS="2", MAX_RESTARTS=str(max_restarts), GLOO_SOCKET_IFNAME="lo"),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_one_node_goes_on_after_a_rank_was_killed(folder):
    process = start_one_node(folder, max_restarts=1)
    metrics = folder / "runs/nano/metrics.jsonl"
    wait_for(lambda: process.poll() is not None or len(read_steps(metrics)) >= 6, "sixth step")
    kill_rank([process], 1)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert '"resumed_from": "runs/nano/checkpoints/step-' in out
    assert read_steps(metrics) == list(range(1, STEPS + 1))
    # The other rank says what it saw, before torchrun starts both again.
    assert err.count("error: ") == 1
    assert "last collective #" in err
    assert list((folder / "runs").rglob(".writing-*")) == []


def test_torchrun_does_not_repeat_what_would_happen_again(folder):
    """It starts ranks again whatever they ended with; those say at once that they would end so as well."""
    process = start_one_node(folder, "train.learning_rate=1e30", "train.warmup_steps=0", max_restarts=1)
    _, err = process.communicate()
    assert process.returncode != 0
    assert "error: training diverged: " in err
    assert "error: started again, and would end as before: training diverged: " in err


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    """Two network namespaces as machines: by which command each is entered."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import netlab
    finally:
        sys.path.pop(0)
    if (problem := netlab.find_problem()) is not None:
        pytest.skip(problem)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with netlab.build_network(2) as network:
        yield [["ip", "netns", "exec", name] for name in network.namespaces]
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_two_nodes_go_on_after_a_rank_of_one_was_killed(folder, nodes):
    """Ranks of different machines talk over the link between them; both agents start theirs again together."""
    processes = [
        subprocess.Popen(
            [*enter, LAUNCH / "several_nodes.sh", "nano.toml"],
            cwd=folder,
            env=build_environ(
                NODES="2", NODE=str(node), RANKS="1", MAX_RESTARTS="1", HOST="10.99.0.1", ADDRESS=f"10.99.0.{node + 1}",
                GLOO_SOCKET_IFNAME="eth0",
            ),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for node, enter in enumerate(nodes)
    ]  # fmt: skip
    metrics = folder / "runs/nano/metrics.jsonl"
    wait_for(lambda: len(read_steps(metrics)) >= 6 or any(p.poll() is not None for p in processes), "sixth step")
    kill_rank(processes, 1)
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert '"resumed_from": "runs/nano/checkpoints/step-' in "".join(out for out, _ in outputs)
    assert read_steps(metrics) == list(range(1, STEPS + 1))
