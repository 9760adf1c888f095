"""One rank of a world that somebody else started: no launcher of ours watches it, so the ranks watch each other.

Each rank has a thread with its own connection to the rendezvous store. It gives a sign of life, posts what the rank
noted (its latest collectives) and looks whether any rank has failed or the one behind it gives no sign of life; if so,
it gives its own rank a moment to notice, and then ends it. The rank that failed first puts the reports of all ranks
into one error.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from signal import SIGTERM
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from plait.comm import trace
from plait.comm.board import ANSWER_S, POLL_S, Board, StoreLost
from plait.comm.environment import Launch
from plait.comm.failure import GRACE_S, Outcome, RankReport, build_failure
from plait.comm.group import choose_device, start_group
from plait.comm.shared.abandoned import remove_abandoned_memory
from plait.errors import ConfigError, PlaitError, TransportError, TransportTimeout

_HEAR_S = GRACE_S + 6 * POLL_S
"""For the rank that reports to hear of all others: they notice the failure, and have a moment to say what they saw."""
_ANNOUNCE_S = _HEAR_S + GRACE_S
"""For the others to hear of that: it waits as long for ranks that are gone."""


@contextmanager
def join(launch: Launch, timeout_s: float, start_timeout_s: float) -> Iterator[int]:
    """Join the world with its process group up, and leave it together with the others, or end them.

    The block is told how often torchrun has started the ranks before.
    """
    trace.identify(f"rank {launch.rank}")
    # Slurm may show each task its own device only, which is then the first.
    is_bound = launch.kind == "slurm" and torch.cuda.device_count() == 1
    device = choose_device(0 if is_bound else launch.local_rank)
    store = _connect(launch, start_timeout_s)
    board = Board(store.clone(), launch, timeout_s)  # type: ignore[attr-defined]
    _check_verdict(board, launch)
    num_before = board.enter(start_timeout_s)
    watch = _Watch(board, timeout_s, has_agent=launch.has_agent_store)
    try:
        with _raised_on_sigterm():
            board.wait_for_arrival(start_timeout_s)
            watch.start()
            group_store = dist.PrefixStore(f"plait/{num_before}/group", store)
            start_group(group_store, launch.rank, launch.world_size, device, timeout_s)
            yield num_before
            have_all_returned = board.wait_for_return(timeout_s)
    except BaseException as error:
        watch.stop()
        _fail(board, error)
    watch.stop()
    if not have_all_returned:
        _fail(board, TransportError(f"{trace.identity()} had finished, but another rank failed"))
    dist.destroy_process_group()
    board.leave()


def _check_verdict(board: Board, launch: Launch) -> None:
    """Not do again what would end as it did; torchrun starts ranks again whatever they ended with."""
    if (verdict := board.find_verdict()) is not None:
        if launch.rank:
            sys.exit(verdict.exit_status)
        raise type(verdict)(f"started again, and would end as before: {verdict.message}", hint=verdict.hint)


@contextmanager
def _raised_on_sigterm() -> Iterator[None]:
    """Let a launcher that ends all ranks when one has died not end them before they have said what they saw."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TransportError(f"{trace.identity()} was told to end by {signal.Signals(number).name}")

    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(SIGTERM, end)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(SIGTERM, signal.SIG_DFL)


def _connect(launch: Launch, timeout_s: float) -> dist.Store:
    where = f"{launch.master_addr}:{launch.master_port}"
    if not launch.holds_store:
        _wait_for_port(launch, timeout_s)
    try:
        store = dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=launch.holds_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise TransportError(
            f"rank {launch.rank}: no rendezvous at {where}: {error}", hint="set MASTER_PORT to a port that is free"
        ) from error
    return store


def _wait_for_port(launch: Launch, timeout_s: float) -> None:
    """Wait until the store can be reached, without the pages that its client logs while it cannot."""
    where = (launch.master_addr, launch.master_port)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(where, timeout=timeout_s).close()
        except socket.gaierror as error:
            raise ConfigError(f"rank {launch.rank}: the host {launch.master_addr!r} is not known: {error}") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"rank {launch.rank}: no rendezvous at {where[0]}:{where[1]} within {timeout_s:.0f} s: {error}",
                    hint="rank 0 holds it: check that it was started and that its host can be reached",
                ) from error
            time.sleep(POLL_S)
        else:
            return


def _fail(board: Board, error: BaseException) -> NoReturn:
    """End this rank, which failed: raise what happened on all ranks if it is the first, else go when that is said."""
    board.limit_s = min(board.limit_s, ANSWER_S)
    if isinstance(error, KeyboardInterrupt):
        board.claim_failure()
        raise error
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGTERM, signal.SIG_IGN)
    remove_abandoned_memory()
    own = RankReport.of_error(board.rank, error)
    try:
        is_first = board.claim_failure()
        board.post(own)
        if not is_first:
            _end_after_report(board, error)
        combined = build_failure(board.wait_for_reports(_HEAR_S))
        board.announce(combined)
        board.leave()
    except StoreLost as lost:
        raise _describe_loss(error, lost) from None
    raise combined from None


def _describe_loss(error: BaseException, lost: StoreLost) -> BaseException:
    """What this rank alone can say when the store is gone, mostly with the rank that held it."""
    if not isinstance(error, PlaitError):
        return error
    if isinstance(error, StoreLost):
        return TransportError(f"{trace.identity()}: {lost.message}{_describe_last()}")
    return type(error)(f"{error.message}\n  and {lost.message}{_describe_last()}", hint=error.hint)


def _end_after_report(board: Board, error: BaseException) -> NoReturn:
    """Exit without a word when another rank shows the report of all; raise the own error if none does."""
    status = board.wait_for_announcement(_ANNOUNCE_S)
    if status is None:
        raise error from None
    with suppress(StoreLost):
        board.leave()
    sys.exit(status)


class _Watch(threading.Thread):
    """Ends this rank when another has failed and this one does not notice, as it hangs or waits for the failed one."""

    def __init__(self, board: Board, timeout_s: float, *, has_agent: bool) -> None:
        super().__init__(name="plait-watch", daemon=True)
        self._board, self._timeout_s = board, timeout_s
        self._stopped = threading.Event()
        self._agent = os.getppid() if has_agent else None

    def stop(self) -> None:
        """Leave it to the main thread to fail or to return; not for longer than the store may take."""
        self._stopped.set()
        if self.is_alive():
            self.join(POLL_S)

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._board.post_beat()
                if self._board.has_failed():
                    self._end()
                rank, silent_s = self._board.find_silence()
                if silent_s > self._timeout_s:
                    self._report_silence(rank, silent_s)
                if self._agent not in (None, os.getppid()):
                    _exit(f"error: {trace.identity()}: torchrun's agent, which started it, is gone{_describe_last()}")
                self._stopped.wait(POLL_S)
        except StoreLost as lost:
            if not self._stopped.wait(GRACE_S):
                _exit(f"error: {trace.identity()}: {lost.message}{_describe_last()}")

    def _end(self) -> None:
        if self._stopped.wait(GRACE_S):
            return
        self._board.post(RankReport(self._board.rank, Outcome.WENT_ON, f"for {GRACE_S:.0f} s after the failure"))
        status = self._board.wait_for_announcement(_ANNOUNCE_S)
        if status is not None:
            _exit("", status)
        _exit(f"error: {trace.identity()} was ended: another rank had failed and did not say why{_describe_last()}")

    def _report_silence(self, rank: int, silent_s: float) -> None:
        """Fail in place of the main thread, which may be anywhere, unless another rank has failed."""
        if not self._board.claim_failure():
            return
        error = TransportTimeout(f"rank {rank} has given no sign of life for {silent_s:.1f} s")
        self._board.post(RankReport.of_error(self._board.rank, error))
        combined = build_failure(self._board.wait_for_reports(_HEAR_S))
        self._board.announce(combined)
        _exit(f"error: {combined}", combined.exit_status)


def _exit(message: str, status: int = TransportError.exit_status) -> None:
    """End the process from a thread, whatever its main thread does."""
    if message:
        sys.stderr.write(f"{message}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _describe_last() -> str:
    return f"\n  last collective {trace.last_collective() or 'none'}"
