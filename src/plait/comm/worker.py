"""The process of one local rank: starts the process group, then runs what the launcher sends until it is told to end."""

import mmap
import os
import pickle
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from plait.comm import trace
from plait.errors import PlaitError

PARENT_POLL_S = 0.5


@dataclass(frozen=True)
class Setup:
    """What a rank has to know to start."""

    rank: int
    world_size: int
    timeout_s: float
    device_type: str | None
    """None to choose: CUDA where it is available."""
    directory: Path
    """Shared by the ranks, removed when they end."""
    parent: int


@dataclass(frozen=True)
class Task:
    """A call to run on every rank: a pickled function and its keyword arguments."""

    payload: bytes
    script: str | None
    """The file that defines what the payload names in `__main__`, if it names anything there."""


@dataclass(frozen=True)
class Answer:
    """How a call ended on one rank: with a pickled result, or with an error."""

    result: bytes | None = None
    error: PlaitError | None = None
    detail: str = ""
    traceback: str = ""


def notes_path(directory: Path, rank: int) -> Path:
    """Where rank `rank` notes its latest collectives."""
    return directory / f"notes-{rank}"


def main(descriptor: int) -> None:
    """Serve the launcher at the other end of the socket `descriptor`."""
    os.set_inheritable(descriptor, False)
    # Ctrl-C reaches every process of the terminal; the launcher is the one that ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as connection:
        setup: Setup = connection.recv()
        Thread(target=_end_with_parent, args=(setup,), daemon=True).start()
        with notes_path(setup.directory, setup.rank).open("r+b") as notes:
            trace.move_notes(mmap.mmap(notes.fileno(), trace.NOTES_BYTES))
        trace.identify(f"rank {setup.rank}")
        connection.send(_attempt(lambda: _start(setup)))
        try:
            while (task := connection.recv()) is not None:
                connection.send(_attempt(lambda: _run(task)))  # noqa: B023 (called at once)
        except EOFError:
            return
        _stop()


def _start(setup: Setup) -> None:
    import torch
    import torch.distributed as dist

    from plait.comm.group import choose_device, start_group

    device = torch.device("cpu") if setup.device_type == "cpu" else choose_device(setup.rank)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = dist.FileStore(str(setup.directory / "store"), setup.world_size)
    start_group(store, setup.rank, setup.world_size, device, setup.timeout_s)


def _stop() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _run(task: Task) -> Any:
    if task.script is not None:
        _adopt_script(task.script)
    function, kwargs = pickle.loads(task.payload)
    return function(**kwargs)


@cache
def _adopt_script(path: str) -> None:
    """Make what the launcher's script defines findable under the name `__main__`, as multiprocessing does."""
    module = ModuleType("__mp_main__")
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))


def _attempt(act: Callable[[], Any]) -> Answer:
    """Whatever `act` ends with, as an answer. A rank that calls `sys.exit` has failed as well: the others still run."""
    try:
        return Answer(result=pickle.dumps(act()))
    except BaseException as error:
        sys.stdout.flush()
        sys.stderr.flush()
        return Answer(
            error=error if isinstance(error, PlaitError) else None,
            detail="".join(traceback.format_exception_only(error)).strip(),
            traceback=traceback.format_exc(),
        )


def _end_with_parent(setup: Setup) -> None:
    """A launcher that was killed cannot end its ranks; they look after it."""
    while os.getppid() == setup.parent:
        time.sleep(PARENT_POLL_S)
    shutil.rmtree(setup.directory, ignore_errors=True)
    os._exit(1)
