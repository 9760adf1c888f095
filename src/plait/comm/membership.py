"""One rank of a world that somebody else started: no launcher of ours watches it, so the ranks watch each other.

Each rank has a thread with its own connection to the rendezvous store. It posts what the rank noted (its latest
collectives) and looks whether any rank has failed; if so, it gives its own rank a moment to notice, and then ends it.
The rank that failed first puts the reports of all ranks into one error.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from signal import SIGTERM
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from plait.comm import trace
from plait.comm.board import POLL_S, Board
from plait.comm.environment import Launch
from plait.comm.failure import GRACE_S, Outcome, RankReport, build_failure
from plait.comm.group import choose_device, start_group
from plait.errors import ConfigError, TransportError, VerificationError

_HEAR_S = GRACE_S + 6 * POLL_S
"""For the rank that reports to hear of all others: they notice the failure, and have a moment to say what they saw."""


@contextmanager
def join(launch: Launch, timeout_s: float, start_timeout_s: float) -> Iterator[None]:
    """Join the world with its process group up, and leave it together with the others, or end them."""
    trace.identify(f"rank {launch.rank}")
    # Slurm may show each task its own device only, which is then the first.
    is_bound = launch.kind == "slurm" and torch.cuda.device_count() == 1
    device = choose_device(0 if is_bound else launch.local_rank)
    store = _connect(launch, start_timeout_s)
    board = Board(store.clone(), launch)  # type: ignore[attr-defined]
    watch = _Watch(board)
    try:
        with _raised_on_sigterm():
            board.wait_for_arrival(start_timeout_s)
            watch.start()
            start_group(dist.PrefixStore("group", store), launch.rank, launch.world_size, device, timeout_s)
            yield
            have_all_returned = board.wait_for_return(timeout_s)
    except BaseException as error:
        watch.stop()
        _fail(board, error)
    watch.stop()
    if not have_all_returned:
        _end_after_report(board, TransportError(f"{trace.identity()} had finished, but another rank failed"))
    dist.destroy_process_group()
    board.leave()


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
    return dist.PrefixStore(f"plait/{launch.attempt}", store)


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
    if isinstance(error, KeyboardInterrupt):
        board.claim_failure()
        raise error
    if threading.current_thread() is threading.main_thread():
        signal.signal(SIGTERM, signal.SIG_IGN)
    own = RankReport.of_error(board.rank, error)
    try:
        is_first = board.claim_failure()
        board.post(own)
        combined = build_failure(board.wait_for_reports(_HEAR_S)) if is_first else error
    except RuntimeError:
        # The store is gone with the rank that held it: each rank has only its own error to show.
        raise error from None
    if not is_first:
        _end_after_report(board, error)
    board.announce_report()
    board.leave()
    raise combined from None


def _end_after_report(board: Board, error: BaseException) -> NoReturn:
    """Exit without a word when another rank shows the report of all; raise the own error if none does."""
    try:
        is_reported = board.wait_for_announcement(_HEAR_S)
        board.leave()
    except RuntimeError:
        is_reported = False
    if not is_reported:
        raise error from None
    sys.exit(1 if isinstance(error, VerificationError) else 2)


class _Watch(threading.Thread):
    """Ends this rank when another has failed and this one does not notice, as it hangs or waits for the failed one."""

    def __init__(self, board: Board) -> None:
        super().__init__(name="plait-watch", daemon=True)
        self._board = board
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Leave it to the main thread to fail or to return."""
        self._stopped.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        try:
            while True:
                self._board.post_notes()
                if self._board.has_failed():
                    self._end()
                if self._stopped.wait(POLL_S):
                    return
        except RuntimeError as error:
            if not self._stopped.wait(GRACE_S):
                _exit(f"error: {trace.identity()} lost the rendezvous store: {error}")

    def _end(self) -> None:
        if self._stopped.wait(GRACE_S):
            return
        self._board.post(RankReport(self._board.rank, Outcome.ABSENT, f"went on for {GRACE_S:.0f} s after the failure"))
        is_reported = self._board.wait_for_announcement(_HEAR_S)
        _exit(
            "" if is_reported else f"error: {trace.identity()} was ended: another rank had failed and did not say why"
        )


def _exit(message: str) -> None:
    """End the process from a thread, whatever its main thread does."""
    if message:
        sys.stderr.write(f"{message}\n  last collective {trace.last_collective() or 'none'}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)
