"""Start ranks on this machine, run functions on all of them, and end them together whatever happens to one."""

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from plait.comm import trace
from plait.comm.failure import Outcome, RankReport, build_failure
from plait.comm.worker import Answer, Setup, Task, notes_path
from plait.errors import ConfigError, PlaitError, TransportError

DEFAULT_TIMEOUT_S = 600.0
START_TIMEOUT_S = 300.0
GRACE_S = 3.0
"""For the other ranks to say what they saw, once one has failed."""
_POLL_S = 0.2
_END_S = 2.0


class LocalRanks:
    """Ranks as processes of this machine, with a process group that stays up from call to call.

    `timeout_s` bounds a collective that not every rank joins, and the time between the first and the last rank to return
    from a call; `call_timeout_s`, where given, a whole call. Close it, or use it as a context manager. The ranks meet in
    a file, not at a port, and talk over the loopback interface.

    Raises:
        PlaitError: the ranks could not be started.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        call_timeout_s: float | None = None,
        device_type: Literal["cpu"] | None = None,
    ) -> None:
        if world_size < 1:
            raise ConfigError(f"{world_size} local ranks cannot be started")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.call_timeout_s = call_timeout_s
        self.failure: PlaitError | None = None
        """Why these ranks can no longer be used."""
        self._directory = Path(tempfile.mkdtemp(prefix="plait-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._finalizer = weakref.finalize(self, _end_all, self._processes, self._connections, self._directory)
        try:
            for rank in range(world_size):
                self._start(rank, device_type)
            self._collect(START_TIMEOUT_S)
        except BaseException:
            self._finalizer()
            raise

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank; the results in rank order.

        Raises:
            PlaitError: what ranks raised on purpose, once.
            TransportError: anything else that happened to a rank, with every rank's error and last collective.
        """
        if self.failure is not None:
            raise TransportError(
                f"these {self.world_size} ranks were ended after a failure: {self.failure.message.splitlines()[0]}",
                hint="start new LocalRanks",
            )
        if not self._finalizer.alive:
            raise TransportError("these ranks are closed", hint="start new LocalRanks")
        task = _build_task(function, kwargs)
        try:
            for connection in self._connections:
                _send(connection, task)
            return self._collect(self.call_timeout_s)
        except BaseException as error:
            if not isinstance(error, PlaitError) or self.failure is not None:
                self._finalizer()
            raise

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections if self._finalizer.alive else ():
            _send(connection, None)
        _wait_for(self._processes, _END_S)
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, rank: int, device_type: Literal["cpu"] | None) -> None:
        notes_path(self._directory, rank).write_bytes(bytes(trace.NOTES_BYTES))
        ours, theirs = Pipe()
        with theirs:
            boot = f"import sys; sys.path[:] = {sys.path!r}; from plait.comm.worker import main; main({theirs.fileno()})"
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", boot],
                env=_build_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._processes.append(process)
        self._connections.append(ours)
        _send(ours, Setup(rank, self.world_size, self.timeout_s, device_type, self._directory, os.getpid()))

    def _collect(self, limit_s: float | None) -> list[Any]:
        """Wait for every rank's answer, or for what shows that one will not come."""
        answers: dict[int, Answer | RankReport] = {}
        start = time.monotonic()
        deadline = float("inf") if limit_s is None else start + limit_s
        while len(answers) < self.world_size and time.monotonic() < deadline:
            for rank in self._wait(answers, deadline):
                answers[rank] = self._receive(rank)
                patience_s = self.timeout_s if _has_returned(answers[rank]) else GRACE_S
                deadline = min(deadline, time.monotonic() + patience_s)
        if all(_has_returned(answer) for answer in answers.values()) and len(answers) == self.world_size:
            return [pickle.loads(answers[rank].result) for rank in range(self.world_size)]  # type: ignore[union-attr,arg-type]
        waited_s = time.monotonic() - start
        reports = [self._report(rank, answers.get(rank), waited_s) for rank in range(self.world_size)]
        error = build_failure(reports)
        if not _is_in_step(reports):
            self.failure = error
        raise error

    def _wait(self, answered: dict[int, Any], deadline: float) -> list[int]:
        """Ranks that have something to say, or have ended."""
        open_ranks = [rank for rank in range(self.world_size) if rank not in answered]
        patience_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
        speaking = wait([self._connections[rank] for rank in open_ranks], patience_s)
        return [
            rank
            for rank in open_ranks
            if self._connections[rank] in speaking or self._processes[rank].poll() is not None
        ]

    def _receive(self, rank: int) -> Answer | RankReport:
        connection, process = self._connections[rank], self._processes[rank]
        try:
            if connection.poll():
                answer: Answer = connection.recv()
                return answer
        except (EOFError, ConnectionError):
            pass
        _wait_for([process], _END_S)
        return RankReport(rank, Outcome.DIED, _describe_exit(process.poll()))

    def _report(self, rank: int, answer: Answer | RankReport | None, waited_s: float) -> RankReport:
        who, noted = trace.read_notes(notes_path(self._directory, rank).read_bytes())
        match answer:
            case None:
                report = RankReport(rank, Outcome.ABSENT, f"no answer within {waited_s:.1f} s")
            case RankReport():
                report = answer
            case Answer() if answer.result is not None:
                report = RankReport(rank, Outcome.RETURNED)
            case Answer():
                report = RankReport(rank, Outcome.RAISED, answer.detail, answer.error, answer.traceback)
        return replace(report, who=who, noted=tuple(noted))


def _has_returned(answer: Answer | RankReport) -> bool:
    return isinstance(answer, Answer) and answer.result is not None


def _is_in_step(reports: list[RankReport]) -> bool:
    """Whether all ranks failed at the same place, outside any collective, so that the group can still be used."""
    positions = {tuple((noted.axis, noted.number) for noted in report.noted) for report in reports}
    return len(positions) == 1 and all(
        report.outcome is Outcome.RAISED and not report.is_transport for report in reports
    )


def _build_task(function: Callable[..., Any], kwargs: dict[str, Any]) -> Task:
    hint = "use a function defined at the top of a module, and arguments that can be pickled"
    try:
        payload = pickle.dumps((function, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"{function!r} cannot be sent to the ranks: {error}", hint=hint) from error
    if b"__main__" not in payload:
        return Task(payload, None)
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        raise ConfigError(f"{function!r} cannot be sent to the ranks: it was not defined in a file", hint=hint)
    return Task(payload, str(Path(script).resolve()))


def _build_environment() -> dict[str, str]:
    """Our variables and those that only local ranks may have: the loopback interface, one thread each."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return environment if loopback is None else {**environment, "GLOO_SOCKET_IFNAME": loopback}


def _send(connection: Connection, message: Setup | Task | None) -> None:
    """Send to a rank; one that has died meanwhile is found when its answer does not come."""
    try:
        connection.send(message)
    except (BrokenPipeError, ConnectionResetError):
        pass


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    return f"exited with status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"


def _wait_for(processes: list[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Whether all processes end by themselves within the limit."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def _end_all(processes: list[subprocess.Popen[bytes]], connections: list[Connection], directory: Path) -> None:
    """Leave no process, connection or file behind."""
    for process in processes:
        process.terminate()
    if not _wait_for(processes, _END_S):
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    for connection in connections:
        connection.close()
    shutil.rmtree(directory, ignore_errors=True)
