"""Commands that train in processes of their own, of which a test ends some."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 400.0
"""For ranks to start, and once more, on a busy machine."""


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S:.0f} s"
        time.sleep(0.02)


def read_steps(metrics: Path) -> list[int]:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def list_descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []
    return [descendant for child in children for descendant in (child, *list_descendants(child))]


def list_ranks(pid: int) -> dict[int, int]:
    """Ranks that torchrun has started below a process: their process ids."""
    found = {}
    for each in list_descendants(pid):
        try:
            environ = Path(f"/proc/{each}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, PermissionError):
            continue
        ranks = [entry for entry in environ if entry.startswith(b"RANK=")]
        if ranks and any(entry.startswith(b"TORCHELASTIC_RUN_ID=") for entry in environ):
            found[int(ranks[0][5:])] = each
    return found


def kill_rank(processes: list["subprocess.Popen[str]"], rank: int) -> None:
    """Kill -9 of a rank below any of the processes."""
    ranks = {number: pid for process in processes for number, pid in list_ranks(process.pid).items()}
    os.kill(ranks[rank], signal.SIGKILL)
