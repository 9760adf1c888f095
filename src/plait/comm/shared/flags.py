"""Flags: numbers in shared memory that only grow, each written by one rank and waited for by others."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from mmap import mmap
from threading import Lock
from weakref import WeakMethod

from plait.comm import trace
from plait.comm.shared import futex
from plait.comm.shared.peer import Peer
from plait.errors import TransportError, TransportTimeout

WORD_BYTES = 8
LINE_WORDS = 8
"""A flag has a cache line of its own, so that writing it disturbs nobody who waits for another."""

_FEW_SPINS, _MANY_SPINS = 200, 20_000
"""Looks before falling asleep, about 10 us and 1 ms. Waking up takes so long that the other rank, if it looks only a
few times, falls asleep itself, and so on for ever; if it is busy for long, many looks only take time from it."""

_SHORT_S = 1e-3
"""A sleep that is so short was not worth it: the next time there are more looks. After a longer one there are fewer,
but not few at once, as one rank that is late once is no sign that cores are shared."""

_GROWTH, _DECAY = 4, 2


class Flags:
    """The words at the start of a mapping, as seen by the rank at `rank` of an axis.

    The first lines hold a byte per rank that says whether it sleeps: waking is a system call, and mostly unneeded.

    Attributes:
        ranks: global ranks on the axis, in order.
    """

    def __init__(
        self, memory: mmap, rank: int, ranks: Sequence[int], peers: Sequence[Peer], timeout_s: Callable[[], float]
    ) -> None:
        self.rank, self.degree = rank, len(ranks)
        self.bytes = memoryview(memory)
        self.words = self.bytes.cast("Q")
        self._checks: list[WeakMethod[Callable[[], None]]] = []
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.ranks, self._peers, self._timeout_s = tuple(ranks), peers, timeout_s
        self._none_asleep = bytes(self.degree)
        self._taken = self.lines_of_sleepers(self.degree)
        self._fence = Lock()
        # Where ranks share a core, one that looks keeps the other from doing what is looked for.
        self._spins, has_cores = _FEW_SPINS, len(os.sched_getaffinity(0)) >= self.degree
        self._most_spins = _MANY_SPINS if has_cores else _FEW_SPINS

    @staticmethod
    def lines_of_sleepers(degree: int) -> int:
        """Lines that the first `degree` bytes take."""
        return -(-degree // (LINE_WORDS * WORD_BYTES))

    def take(self, num_lines: int) -> int:
        """The first word of lines that nobody has taken yet."""
        first = self._taken * LINE_WORDS
        self._taken += num_lines
        return first

    def check_also(self, check: Callable[[], None]) -> None:
        """Call the method `check` now and then while waiting, for as long as its object lives; it may raise."""
        self._checks.append(WeakMethod(check))

    def raise_to(self, word: int, value: int) -> None:
        """Let `word`, which only this rank writes, be `value`, after everything this rank has written before."""
        # Taking and releasing a lock are locked instructions: data written past the caches is out before the flag, and
        # the flag is out before the look at who sleeps.
        with self._fence:
            self.words[word] = value
        if self.bytes[: self.degree] != self._none_asleep:
            futex.wake(self._address + WORD_BYTES * word)

    def wait(self, word: int, value: int, rank: int) -> None:
        """Return when `word`, written by the rank at `rank` of the axis, is at least `value`.

        Raises:
            TransportTimeout: it was not in time.
            TransportError: that rank has died.
        """
        words = self.words
        if words[word] >= value:
            return
        begun = time.monotonic()
        for _ in range(self._spins):
            if words[word] >= value:
                trace.note_wait(time.monotonic() - begun)
                return
        start, waited_s = time.monotonic(), 0.0
        while words[word] < value:
            self._sleep(word, value)
            waited_s = time.monotonic() - start
            self._check(word, value, rank, waited_s)
        trace.note_wait(start + waited_s - begun)
        if waited_s < _SHORT_S:
            self._spins = min(_GROWTH * self._spins, self._most_spins)
        else:
            self._spins = max(self._spins // _DECAY, _FEW_SPINS)

    def _sleep(self, word: int, value: int) -> None:
        self.bytes[self.rank] = 1
        try:
            with self._fence:
                pass
            seen = self.words[word]
            if seen < value:
                futex.sleep(self._address + WORD_BYTES * word, seen)
        finally:
            self.bytes[self.rank] = 0

    def _check(self, word: int, value: int, rank: int, waited_s: float) -> None:
        """Raise if the wait is in vain."""
        if waited_s < futex.SLEEP_S:
            return
        for find_check in self._checks:
            if (check := find_check()) is not None:
                check()
        # Others may leave when their part is done, so it is only this one who has to be there.
        is_gone = self._peers[rank].is_gone()
        if self.words[word] >= value:
            return
        failed = f"{trace.identity()}: {trace.last_collective()} failed"
        if is_gone:
            raise TransportError(f"{failed}: rank {self.ranks[rank]} has died")
        if waited_s > (limit_s := self._timeout_s()):
            raise TransportTimeout(
                f"{failed}: timed out, rank {self.ranks[rank]} did not do its part within {limit_s:g} s"
            )
