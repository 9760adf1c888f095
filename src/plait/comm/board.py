"""The notice board of a world without a launcher of ours: what ranks tell each other through the rendezvous store."""

import pickle
import time
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from plait.comm import trace
from plait.comm.environment import Launch
from plait.comm.failure import GRACE_S, Outcome, RankReport
from plait.errors import TransportTimeout

POLL_S = 0.5


class Board:
    """Notices of the ranks of one world; every method may raise RuntimeError when the store is gone."""

    def __init__(self, store: dist.Store, launch: Launch) -> None:
        self.rank = launch.rank
        self._world_size = launch.world_size
        self._holds_store = launch.holds_store
        self._store = store

    def wait_for_arrival(self, limit_s: float) -> None:
        """Wait for all ranks to come.

        Raises:
            TransportTimeout: naming those that did not.
        """
        self._store.set(f"arrived/{self.rank}", "")
        if not _poll(lambda: not self._missing("arrived"), limit_s):
            missing = ", ".join(map(str, self._missing("arrived")))
            raise TransportTimeout(
                f"rank {self.rank}: of {self._world_size} ranks, {missing} did not come within {limit_s:.0f} s",
                hint="check that every host started its ranks (under Slurm with srun) and knows the same first host",
            )

    def wait_for_return(self, limit_s: float) -> bool:
        """Wait for all ranks to finish; whether they did, or one has failed.

        Raises:
            TransportTimeout: neither within the limit.
        """
        self._store.set(f"returned/{self.rank}", "")
        if not _poll(lambda: not self._missing("returned") or self.has_failed(), limit_s):
            missing = ", ".join(map(str, self._missing("returned")))
            raise TransportTimeout(f"rank {self.rank} has finished, but ranks {missing} did not within {limit_s:.0f} s")
        return not self._missing("returned")

    def leave(self) -> None:
        """Say that nothing more is read here; the rank that holds the store waits for all to say so."""
        self._store.set(f"left/{self.rank}", "")
        if self._holds_store:
            _poll(lambda: not self._missing("left"), GRACE_S)

    def post_notes(self) -> None:
        """Let others read the latest collectives of this rank."""
        self._store.set(f"notes/{self.rank}", trace.copy_notes().hex())

    def claim_failure(self) -> bool:
        """Say that the world has failed; whether this rank is the first to say so."""
        return self._store.add("failed", 1) == 1

    def has_failed(self) -> bool:
        """Whether a rank has said that the world has failed."""
        return self._store.check(["failed"])

    def post(self, report: RankReport) -> None:
        """Say how this rank ended."""
        self.post_notes()
        self._store.set(f"report/{self.rank}", pickle.dumps(report).hex())

    def wait_for_reports(self, limit_s: float) -> list[RankReport]:
        """The reports of all ranks; after the limit, those that said nothing as absent."""
        start = time.monotonic()
        _poll(lambda: not self._missing("report"), limit_s)
        return [self._read(rank, time.monotonic() - start) for rank in range(self._world_size)]

    def announce_report(self) -> None:
        """Say that the reports of all ranks are about to be shown."""
        self._store.set("announced", "")

    def wait_for_announcement(self, limit_s: float) -> bool:
        """Whether a rank shows the reports of all within the limit."""
        return _poll(lambda: self._store.check(["announced"]), limit_s)

    def _missing(self, notice: str) -> list[int]:
        """Ranks that have not posted a notice."""
        if self._store.check([f"{notice}/{rank}" for rank in range(self._world_size)]):
            return []
        return [rank for rank in range(self._world_size) if not self._store.check([f"{notice}/{rank}"])]

    def _read(self, rank: int, waited_s: float) -> RankReport:
        if self._store.check([f"report/{rank}"]):
            report: RankReport = pickle.loads(self._get(f"report/{rank}"))
        elif self._store.check([f"returned/{rank}"]):
            report = RankReport(rank, Outcome.RETURNED)
        else:
            report = RankReport(rank, Outcome.ABSENT, f"said nothing for {waited_s:.1f} s")
        if not self._store.check([f"notes/{rank}"]):
            return report
        who, noted = trace.read_notes(self._get(f"notes/{rank}"))
        return replace(report, who=who, noted=tuple(noted))

    def _get(self, notice: str) -> bytes:
        return bytes.fromhex(self._store.get(notice).decode())


def _poll(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Whether something becomes so within the limit."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(min(POLL_S, limit_s) / 5)
    return True
