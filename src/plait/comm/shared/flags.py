"""Flags: numbers in shared memory that only grow, each written by one rank and waited for by others."""

import ctypes
import time
from collections.abc import Callable, Sequence
from mmap import mmap
from threading import Lock

from plait.comm import trace
from plait.comm.shared import futex
from plait.comm.shared.peer import Peer
from plait.errors import TransportError, TransportTimeout

WORD_BYTES = 8
LINE_WORDS = 8
"""A flag has a cache line of its own, so that writing it disturbs nobody who waits for another."""

_SPINS = 200
"""Looks before falling asleep: about the 10 us that a sleep and its wake-up cost."""


class Flags:
    """The words at the start of a mapping, as seen by the rank at `rank` of an axis.

    The first lines hold a byte per rank that says whether it sleeps: waking is a system call, and mostly unneeded.

    Attributes:
        ranks: global ranks on the axis, in order.
        on_wait: asked now and then by a rank that waits, to raise what shows that it waits in vain.
    """

    def __init__(
        self, memory: mmap, rank: int, ranks: Sequence[int], peers: Sequence[Peer], timeout_s: Callable[[], float]
    ) -> None:
        self.rank, self.degree = rank, len(ranks)
        self.bytes = memoryview(memory)
        self.words = self.bytes.cast("Q")
        self.on_wait: list[Callable[[], None]] = []
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.ranks, self._peers, self._timeout_s = tuple(ranks), peers, timeout_s
        self._none_asleep = bytes(self.degree)
        self._taken = self.lines_of_sleepers(self.degree)
        self._fence = Lock()

    @staticmethod
    def lines_of_sleepers(degree: int) -> int:
        """Lines that the first `degree` bytes take."""
        return -(-degree // (LINE_WORDS * WORD_BYTES))

    def take(self, num_lines: int) -> int:
        """The first word of lines that nobody has taken yet."""
        first = self._taken * LINE_WORDS
        self._taken += num_lines
        return first

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
            TransportError: a rank of the axis has died.
        """
        words = self.words
        for _ in range(_SPINS):
            if words[word] >= value:
                return
        start = time.monotonic()
        while words[word] < value:
            self._sleep(word, value)
            self._check(word, value, rank, time.monotonic() - start)

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
        if self.words[word] >= value or waited_s < futex.SLEEP_S:
            return
        for check in self.on_wait:
            check()
        gone = [self.ranks[at] for at, peer in enumerate(self._peers) if at != self.rank and peer.is_gone()]
        if self.words[word] >= value:
            return
        if gone:
            raise TransportError(
                f"{trace.identity()}: {trace.last_collective()} failed: rank {', '.join(map(str, gone))} has died"
            )
        if waited_s > (limit_s := self._timeout_s()):
            raise TransportTimeout(
                f"{trace.identity()}: {trace.last_collective()} failed: timed out, "
                f"rank {self.ranks[rank]} did not do its part within {limit_s:.0f} s"
            )
