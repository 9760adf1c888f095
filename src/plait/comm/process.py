"""The launcher's end of one local rank: the process, and the socket to it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Pipe, wait

from plait.comm import trace
from plait.comm.failure import Outcome, RankReport
from plait.comm.message import Result, Setup, Task

_END_S = 2.0
"""For a process that has closed its socket, or was told to end, to be gone."""

_BOOT = """\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; it is the launcher that ends the ranks
sys.path[:] = {path!r}
from plait.comm.worker import main
main({descriptor})
"""


class RankProcess:
    """A local rank as its launcher sees it; the process starts at once."""

    def __init__(self, setup: Setup) -> None:
        self.rank = setup.rank
        self._notes = setup.notes
        self._notes.write_bytes(bytes(trace.NOTES_BYTES))
        self._connection, theirs = Pipe()
        with theirs:
            # Not multiprocessing: its children would run the user's script again before they are ranks.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT.format(path=sys.path, descriptor=theirs.fileno())],
                env=build_environment(os.environ),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.send(setup)

    def send(self, message: Setup | Task | None) -> None:
        """Send to the rank; that it died meanwhile is found when its answer does not come."""
        with suppress(ConnectionError):
            self._connection.send(message)

    def receive(self) -> Result | RankReport:
        """What the rank says, or how it died."""
        try:
            if self._connection.poll():
                answer: Result | RankReport = self._connection.recv()
                return answer
        except (EOFError, ConnectionError):
            pass
        self.wait(_END_S)
        return RankReport(self.rank, Outcome.DIED, _describe_exit(self._process.poll()))

    def annotate(self, report: RankReport) -> RankReport:
        """Add what the rank noted, which outlives it."""
        who, noted = trace.read_notes(self._notes.read_bytes())
        return replace(report, who=who, noted=tuple(noted))

    def wait(self, limit_s: float) -> bool:
        """Whether the process is gone within the limit."""
        try:
            self._process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; none if the process is gone."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Leave nothing behind. A rank that goes on when others are gone does nothing of use, so it is not asked."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def find_news(processes: Iterable[RankProcess], patience_s: float) -> list[RankProcess]:
    """Wait for a rank to say something or to die; those that did."""
    listed = list(processes)
    speaking = wait([process._connection for process in listed], max(0.0, patience_s))
    return [process for process in listed if process._connection in speaking or process._process.poll() is not None]


def wait_for_end(processes: Iterable[RankProcess]) -> None:
    """Wait for processes that were told to end, a moment for all of them together."""
    deadline = time.monotonic() + _END_S
    for process in processes:
        process.wait(deadline - time.monotonic())


def build_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Our variables and those that only local ranks may have: one thread each, and the loopback interface."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    environment = {"OMP_NUM_THREADS": "1", **environ}
    return environment if loopback is None else {**environment, "GLOO_SOCKET_IFNAME": loopback}


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    return f"exited with status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
