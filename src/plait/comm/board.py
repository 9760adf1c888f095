"""The notice board of a world without a launcher of ours: what ranks tell each other through the rendezvous store."""

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist

from plait.comm import trace
from plait.comm.environment import Launch
from plait.comm.failure import GRACE_S, Outcome, RankReport
from plait.errors import PlaitError, TransportError, TransportTimeout

POLL_S = 0.5
ANSWER_S = 10.0
"""For the store to answer a rank that has failed and wants to say so."""

_ABSENT_HINT = "check that every host started its ranks (under Slurm with srun) and knows the same first host"

_BEAT_BYTES = 8


class StoreLost(TransportError):
    """The rendezvous store is gone, or whoever holds it hangs."""


class Board:
    """Notices of the ranks of one world, and of those that torchrun started in their place before.

    Every method may raise StoreLost.

    Attributes:
        limit_s: for the store to answer.
    """

    def __init__(self, store: dist.Store, launch: Launch, limit_s: float) -> None:
        self.rank = launch.rank
        self.limit_s = limit_s
        self._world_size = launch.world_size
        self._holds_store = launch.holds_store
        self._holder = "torchrun's agent holds" if launch.has_agent_store else "rank 0 holds"
        self._all_worlds = self._store = dist.PrefixStore("plait", store)
        self._world, self._num_answered = 0, 0
        self._beats = count(1)
        self._next = (launch.rank + 1) % launch.world_size
        self._seen: tuple[bytes, float] | None = None

    def enter(self, limit_s: float) -> int:
        """Find the world of this start of the ranks, the same on all of them; how often ranks were started before.

        torchrun keeps the store when it starts ranks again, and each of its agents has a count of its own. So it is the
        first rank that counts, and the others knock and are answered which world it is.

        Raises:
            TransportTimeout: the first rank did not come.
        """
        if self.rank == 0:
            self._world = int(self._ask(lambda: self._all_worlds.add("worlds", 1)))
        else:
            knock = self._ask(lambda: self._all_worlds.add("knocks", 1))
            if not _poll(lambda: bool(self._ask(lambda: self._all_worlds.check([f"answer/{knock}"]))), limit_s):
                raise TransportTimeout(_describe_missing(self.rank, self._world_size, "0", limit_s), hint=_ABSENT_HINT)
            self._world = int(self._ask(lambda: self._all_worlds.get(f"answer/{knock}")))
        self._store = dist.PrefixStore(f"{self._world}", self._all_worlds)
        return self._world - 1

    def wait_for_arrival(self, limit_s: float) -> None:
        """Wait for all ranks to come.

        Raises:
            TransportTimeout: naming those that did not.
        """
        self._set("arrived")
        if not _poll(self._have_all_arrived, limit_s):
            missing = ", ".join(map(str, self._missing("arrived")))
            raise TransportTimeout(_describe_missing(self.rank, self._world_size, missing, limit_s), hint=_ABSENT_HINT)

    def _have_all_arrived(self) -> bool:
        if self.rank == 0:
            num_knocks = int(self._ask(lambda: self._all_worlds.add("knocks", 0)))
            for knock in range(self._num_answered + 1, num_knocks + 1):
                self._ask(partial(self._all_worlds.set, f"answer/{knock}", str(self._world)))
            self._num_answered = num_knocks
        return self._have_all("arrived")

    def wait_for_return(self, limit_s: float) -> bool:
        """Wait for all ranks to finish; whether they did, or one has failed.

        Raises:
            TransportTimeout: neither within the limit.
        """
        self._set("returned")
        if not _poll(lambda: self._have_all("returned") or self.has_failed(), limit_s):
            missing = ", ".join(map(str, self._missing("returned")))
            raise TransportTimeout(f"rank {self.rank} has finished, but ranks {missing} did not within {limit_s:.0f} s")
        return self._have_all("returned")

    def leave(self) -> None:
        """Say that nothing more is read here; the rank that holds the store waits for all to say so."""
        self._set("left")
        if self._holds_store:
            _poll(lambda: self._have_all("left"), GRACE_S)

    def post_beat(self) -> None:
        """Give a sign of life, and let others read the latest collectives of this rank."""
        self._set("notes", next(self._beats).to_bytes(_BEAT_BYTES, "little") + trace.copy_notes())

    def find_silence(self) -> tuple[int, float]:
        """The rank behind this one, and for how long it has given no sign of life; so every rank is watched by one."""
        beat = (self._find("notes", self._next) or b"")[:_BEAT_BYTES]
        now = time.monotonic()
        if self._seen is None or self._seen[0] != beat:
            self._seen = beat, now
        return self._next, now - self._seen[1]

    def claim_failure(self) -> bool:
        """Say that the world has failed; whether this rank is the first to say so."""
        return bool(self._ask(lambda: self._store.add("failed", 1)) == 1)

    def has_failed(self) -> bool:
        """Whether a rank has said that the world has failed."""
        return bool(self._ask(lambda: self._store.check(["failed"])))

    def post(self, report: RankReport) -> None:
        """Say how this rank ended."""
        self.post_beat()
        self._set("report", pickle.dumps(report))

    def wait_for_reports(self, limit_s: float) -> list[RankReport]:
        """The reports of all ranks; after the limit, those that said nothing as absent."""
        start = time.monotonic()
        _poll(lambda: self._have_all("report"), limit_s)
        return [self._read(rank, time.monotonic() - start) for rank in range(self._world_size)]

    def announce(self, combined: PlaitError) -> None:
        """Say that what happened on all ranks is about to be shown, and whether it would happen again."""
        if not isinstance(combined, TransportError):
            self._ask(lambda: self._all_worlds.set("verdict", pickle.dumps(combined).hex()))
        self._ask(lambda: self._store.set("announced", str(combined.exit_status)))

    def wait_for_announcement(self, limit_s: float) -> int | None:
        """The status with which all ranks exit, as one shows what happened on all; None if none does in time."""
        if not _poll(lambda: bool(self._ask(lambda: self._store.check(["announced"]))), limit_s):
            return None
        return int(self._ask(lambda: self._store.get("announced")))

    def find_verdict(self) -> PlaitError | None:
        """What ranks before these ended with, if these would end with it as well."""
        if not self._ask(lambda: self._all_worlds.check(["verdict"])):
            return None
        error: PlaitError = pickle.loads(bytes.fromhex(self._ask(lambda: self._all_worlds.get("verdict")).decode()))
        return error

    def _have_all(self, notice: str) -> bool:
        """Whether all ranks have posted a notice: one question, as all of them ask it over and over."""
        return bool(self._ask(lambda: self._store.check([f"{notice}/{rank}" for rank in range(self._world_size)])))

    def _missing(self, notice: str) -> list[int]:
        """Ranks that have not posted a notice."""
        return [rank for rank in range(self._world_size) if not self._has(notice, rank)]

    def _read(self, rank: int, waited_s: float) -> RankReport:
        if (posted := self._find("report", rank)) is not None:
            report: RankReport = pickle.loads(posted)
        elif self._has("returned", rank):
            report = RankReport(rank, Outcome.RETURNED)
        else:
            report = RankReport(rank, Outcome.ABSENT, f"said nothing for {waited_s:.1f} s")
        if (notes := self._find("notes", rank)) is None:
            return report
        who, noted = trace.read_notes(notes[_BEAT_BYTES:])
        return replace(report, who=who, noted=tuple(noted))

    def _set(self, notice: str, value: bytes = b"") -> None:
        self._ask(lambda: self._store.set(f"{notice}/{self.rank}", value.hex()))

    def _has(self, notice: str, rank: int) -> bool:
        return bool(self._ask(lambda: self._store.check([f"{notice}/{rank}"])))

    def _find(self, notice: str, rank: int) -> bytes | None:
        """What a rank has posted; to get what is not there would wait for it."""
        if not self._has(notice, rank):
            return None
        return bytes.fromhex(self._ask(lambda: self._store.get(f"{notice}/{rank}")).decode())

    def _ask(self, act: Callable[[], Any]) -> Any:
        """What the store answers. It is asked in a thread, as nothing else ends a question to a process that hangs."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(act())
            except RuntimeError as error:
                answers.append(error)

        thread = threading.Thread(target=ask, name="plait-ask", daemon=True)
        thread.start()
        thread.join(self.limit_s)
        if not answers:
            raise StoreLost(f"the rendezvous store, which {self._holder}, does not answer for {self.limit_s:g} s")
        if isinstance(answers[0], RuntimeError):
            raise StoreLost(f"the rendezvous store, which {self._holder}, is gone") from answers[0]
        return answers[0]


def _describe_missing(rank: int, world_size: int, missing: str, limit_s: float) -> str:
    return f"rank {rank}: of {world_size} ranks, {missing} did not come within {limit_s:.0f} s"


def _poll(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Whether something becomes so within the limit."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(min(POLL_S, limit_s) / 5)
    return True
