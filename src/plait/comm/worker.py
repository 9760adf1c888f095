"""The process of one local rank: starts the process group, then runs what its launcher sends until told to end."""

import mmap
import os
import pickle
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from threading import Thread
from types import ModuleType
from typing import Any

import torch.distributed as dist

from plait.comm import trace
from plait.comm.failure import RankReport
from plait.comm.group import choose_device, start_group
from plait.comm.launch import imported_script
from plait.comm.message import Result, Setup, Task

_LAUNCHER_POLL_S = 0.5


def main(descriptor: int) -> None:
    """Serve the launcher at the other end of the socket `descriptor`."""
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection:
        setup: Setup = connection.recv()
        Thread(target=_end_with_launcher, args=(setup,), daemon=True).start()
        with setup.notes.open("r+b") as notes:
            trace.move_notes(mmap.mmap(notes.fileno(), trace.NOTES_BYTES))
        trace.identify(f"rank {setup.rank}")
        connection.send(_attempt(partial(_start, setup), setup.rank))
        try:
            while (task := connection.recv()) is not None:
                connection.send(_attempt(partial(_run, task), setup.rank))
        except (EOFError, ConnectionError):
            return
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(setup: Setup) -> None:
    device = choose_device(setup.rank, setup.device_type)
    store = dist.FileStore(str(setup.directory / "store"), setup.world_size)
    start_group(store, setup.rank, setup.world_size, device, setup.timeout_s)


def _run(task: Task) -> Any:
    trace.forget()
    if task.script is not None:
        _adopt_script(task.script)
    function, kwargs = pickle.loads(task.payload)
    return function(**kwargs)


@cache
def _adopt_script(path: str) -> None:
    """Make what the launcher's script defines findable under the name `__main__`, as multiprocessing does."""
    module = ModuleType("__mp_main__")
    sys.modules["__mp_main__"] = sys.modules["__main__"] = module
    token = imported_script.set(path)
    try:
        module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    finally:
        imported_script.reset(token)


def _attempt(act: Callable[[], Any], rank: int) -> Result | RankReport:
    """Whatever `act` ends with. A rank that calls `sys.exit` has failed as well: the others still run."""
    try:
        return Result(pickle.dumps(act()))
    except BaseException as error:
        return RankReport.of_error(rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _end_with_launcher(setup: Setup) -> None:
    """A launcher that was killed cannot end its ranks; they look after it."""
    while os.getppid() == setup.launcher:
        time.sleep(_LAUNCHER_POLL_S)
    shutil.rmtree(setup.directory, ignore_errors=True)
    os._exit(1)
