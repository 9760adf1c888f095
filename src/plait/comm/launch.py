"""Ranks that start together and end together, whatever happens to one of them."""

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, Self

from plait.comm.environment import Launch
from plait.comm.failure import GRACE_S, Outcome, RankReport, build_failure
from plait.comm.message import Result, Setup, Task
from plait.comm.process import RankProcess, find_news, wait_for_end
from plait.comm.shared.abandoned import remove_abandoned_memory
from plait.errors import ConfigError, TransportError

DEFAULT_TIMEOUT_S = 600.0
START_TIMEOUT_S = 300.0
"""For all ranks to be up: importing torch takes a minute on a busy machine."""

MAX_LOCAL_RANKS = 256
"""More processes than that would bring a machine down rather than train."""

_POLL_S = 0.2

imported_script: ContextVar[str | None] = ContextVar("imported_script", default=None)
"""On a rank, while it imports the script of its launcher: that script's path."""


@contextmanager
def init_from_environment(
    launch: Launch, timeout_s: float = DEFAULT_TIMEOUT_S, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[int]:
    """Be one rank of a world that torchrun or Slurm started, inside the block; how often torchrun did so before.

    The process group is up in the block. A rank that leaves it with an error, dies or hangs ends the others: one of
    them raises an error that shows what happened on every rank, the rest exit silently with the same status.

    Raises:
        TransportTimeout: not every rank came.
    """
    from plait.comm.membership import join  # noqa: PLC0415 (the launcher of local ranks needs no torch)

    with join(launch, timeout_s, start_timeout_s) as num_before:
        yield num_before


class LocalRanks:
    """Ranks as processes of this machine, with a process group that stays up from call to call.

    `timeout_s` bounds a collective that not every rank joins, and the time between the first and the last rank to
    return from a call; `call_timeout_s`, where given, a whole call; `start_timeout_s` the time until all are up. Close
    it, or use it as a context manager. The ranks meet in a file, not at a port, and talk over the loopback interface;
    what they print appears as it is.

    Raises:
        PlaitError: the ranks could not be started.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        call_timeout_s: float | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        device_type: Literal["cpu"] | None = None,
    ) -> None:
        if not 1 <= world_size <= MAX_LOCAL_RANKS:
            raise ConfigError(
                f"{world_size} ranks cannot be started on this machine: it takes 1 to {MAX_LOCAL_RANKS}",
                hint="choose smaller degrees, or start the ranks of several machines with torchrun or Slurm",
            )
        if (script := imported_script.get()) is not None:
            raise ConfigError(
                f"{script} starts local ranks when it is imported, as every one of them does to find what it is to run",
                hint='put what starts them below if __name__ == "__main__":',
            )
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.call_timeout_s = call_timeout_s
        self.failure: str | None = None
        """Why these ranks can no longer be used."""
        self._is_asked_to_stop = False
        self._processes: list[RankProcess] = []
        directory = Path(tempfile.mkdtemp(prefix="plait-ranks-"))
        self._end = weakref.finalize(self, _end_all, self._processes, directory)
        with self._ended_on_error():
            for rank in range(world_size):
                setup = Setup(rank, world_size, timeout_s, device_type, directory, os.getpid())
                self._processes.append(_start_process(setup))
            self._collect(start_timeout_s)

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank; the results in rank order.

        Raises:
            PlaitError: what ranks raised on purpose, once.
            TransportError: anything else that happened to a rank, with every rank's error and last collective.
        """
        if self.failure is not None:
            raise TransportError(
                f"these {self.world_size} ranks were ended: {self.failure}", hint="start new LocalRanks"
            )
        task = _build_task(function, kwargs)
        for process in self._processes:
            process.send(task)
        return self._collect(self.call_timeout_s)

    def ask_to_stop(self) -> None:
        """Pass a request to stop on to the ranks, as SIGTERM. A rank that does not handle it ends, and all with it."""
        self._is_asked_to_stop = True
        for process in self._processes:
            process.signal(signal.SIGTERM)

    def close(self) -> None:
        """End the ranks."""
        if self.failure is None:
            self.failure = "they were closed"
            for process in self._processes:
                process.send(None)
            wait_for_end(self._processes)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.failure = str(error).partition("\n")[0] or type(error).__name__
        self._end()
        remove_abandoned_memory()

    def _collect(self, limit_s: float | None) -> list[Any]:
        """The results of all ranks. Else their error, and their end, unless all raised together and are in step."""
        start = time.monotonic()
        with self._ended_on_error():
            answers = self._wait_for_answers(start, limit_s)
        results = [answer for _, answer in sorted(answers.items()) if isinstance(answer, Result)]
        if len(results) == self.world_size:
            return [pickle.loads(result.payload) for result in results]
        reports = [self._report(process, answers.get(process.rank), start) for process in self._processes]
        if self._is_asked_to_stop and any(report.outcome is Outcome.DIED for report in reports):
            self._fail(KeyboardInterrupt())
            raise KeyboardInterrupt
        error = build_failure(reports)
        if not _is_in_step(reports):
            self._fail(error)
        raise error

    def _wait_for_answers(self, start: float, limit_s: float | None) -> dict[int, Result | RankReport]:
        """Answers by rank, without those that have not come when it is shown that they will not."""
        answers: dict[int, Result | RankReport] = {}
        deadline = start + (float("inf") if limit_s is None else limit_s)
        while len(answers) < self.world_size and (left_s := deadline - time.monotonic()) > 0:
            silent = [process for process in self._processes if process.rank not in answers]
            for process in find_news(silent, min(_POLL_S, left_s)):
                answers[process.rank] = answer = process.receive()
                patience_s = GRACE_S + (self.timeout_s if isinstance(answer, Result) else 0.0)
                deadline = min(deadline, time.monotonic() + patience_s)
        return answers

    def _report(self, process: RankProcess, answer: Result | RankReport | None, start: float) -> RankReport:
        if answer is None:
            waited_s = time.monotonic() - start
            answer = RankReport(process.rank, Outcome.ABSENT, f"no answer within {waited_s:.1f} s")
        elif isinstance(answer, Result):
            answer = RankReport(process.rank, Outcome.RETURNED)
        return process.annotate(answer)


def _start_process(setup: Setup) -> RankProcess:
    try:
        return RankProcess(setup)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        hint = "set TMPDIR to a folder with room, or free memory for processes"
        raise ConfigError(f"rank {setup.rank} cannot be started: {what}", hint=hint) from error


def _is_in_step(reports: list[RankReport]) -> bool:
    """Whether all ranks raised outside any collective, after the same ones, so that the group can still be used."""
    numbers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for report in reports:
        for group, number in {(noted.axis, noted.first_rank): noted.number for noted in report.noted}.items():
            numbers[group].add(number)
    return all(len(found) == 1 for found in numbers.values()) and all(
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
    if script is None or not Path(script).is_file():
        raise ConfigError(f"{function!r} cannot be sent to the ranks: it was not defined in a file", hint=hint)
    return Task(payload, str(Path(script).resolve()))


def _end_all(processes: list[RankProcess], directory: Path) -> None:
    """Leave no process and no file behind."""
    for process in processes:
        process.end()
    shutil.rmtree(directory, ignore_errors=True)
