"""Channels: memory in two halves that turns use alternately, and the flags that say how far each rank is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.shared.arena import Arena, NoRoom
from plait.comm.shared.flags import LINE_WORDS, WORD_BYTES, Flags
from plait.errors import TransportError

Views = TypeVar("Views")

_LINE_BYTES = LINE_WORDS * WORD_BYTES
_TEXT_BYTES = 112
_NOTE_LINES = 2
"""Of a turn: its number, a hash of what it is, and that in words."""


class Plan(Generic[Views]):
    """A kind of turn: tensors of one dtype in half of a channel's memory, and views of them; made once for each kind.

    Attributes:
        holds: what must live as long as this, as its id says what it is for.
    """

    def __init__(
        self,
        text: str,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        arrange: Callable[[list[Tensor]], Views],
        holds: object = None,
    ) -> None:
        self.text = text.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        self.hash = int.from_bytes(blake2b(text.encode(), digest_size=WORD_BYTES).digest(), "little")
        self.holds = holds
        self.views: tuple[Views, Views]
        self.memory: object = None
        self._shapes, self._dtype, self._arrange = tuple(map(tuple, shapes)), dtype, arrange
        self._sizes = [prod(shape) * dtype.itemsize for shape in self._shapes]
        # Each tensor starts at a cache line.
        self._edges = [0, *accumulate(-(-size // _LINE_BYTES) * _LINE_BYTES for size in self._sizes)]
        self.num_bytes = self._edges[-1]

    def lay_out(self, halves: tuple[Tensor, Tensor]) -> None:
        """Find the tensors in the memory of a channel."""
        self.memory = halves
        self.views = self._view(halves[0]), self._view(halves[1])

    def _view(self, half: Tensor) -> Views:
        tensors = [
            half[start : start + size].view(self._dtype).view(shape)
            for start, size, shape in zip(self._edges, self._sizes, self._shapes, strict=False)
        ]
        return self._arrange(tensors)


@dataclass(frozen=True, eq=False)
class _Retired:
    """Memory that was replaced in turn `number`."""

    memory: Tensor
    number: int


class Channel:
    """One sequence of turns, which all ranks of an axis take in the same order.

    A turn writes where the turn before the last wrote. So nobody may begin one before all have begun the last, and with
    that ended the one before.

    Attributes:
        number: of the turn under way.
        values: the word of each rank in which it says what it has made readable for all.
        begun: the word of each rank in which it says which turn it has begun.
        addends: the words of each rank in which it says what it has made readable for each other rank.
    """

    def __init__(self, flags: Flags, arena: Arena) -> None:
        self.flags, self.rank, self.degree = flags, flags.rank, flags.degree
        self.number = 0
        self.others = tuple(rank for rank in range(self.degree) if rank != self.rank)
        self._arena = arena
        self._halves: tuple[Tensor, Tensor] | None = None
        self._whole: Tensor | None = None
        self._capacity = -1
        self._retired: list[_Retired] = []
        self._refused_bytes = 0
        self._refusal: NoRoom | None = None
        self._hash = 0
        first = flags.take(self.num_lines(self.degree))
        degree = self.degree
        self.values = _list_lines(first, degree)
        self.begun = _list_lines(self.values.stop, degree)
        self.addends = tuple(
            _list_lines(self.begun.stop + rank * degree * LINE_WORDS, degree) for rank in range(degree)
        )
        notes = range(self.addends[-1].stop, first + self.num_lines(degree) * LINE_WORDS, _NOTE_LINES * LINE_WORDS)
        self._notes = notes[:degree], notes[degree:]
        flags.check_also(self._compare)

    @staticmethod
    def num_lines(degree: int) -> int:
        """Lines of flags that a channel takes."""
        return degree * (2 + degree + 2 * _NOTE_LINES)

    def reserve(self, plan: Plan[Any]) -> str | None:
        """Have memory for turns of a kind; why there is none. All ranks have to call it, between the same turns."""
        try:
            self._check_room(plan)
            with torch.inference_mode(False):
                self._grow(plan.num_bytes, self.number + 1)
        except NoRoom as error:
            return error.lack
        return None

    def begin(self, plan: Plan[Views]) -> Views:
        """Begin the next turn; the memory for it. What the turn before the last lent may be overwritten from now on.

        Raises:
            NoRoom: there is not so much memory.
        """
        self._check_room(plan)
        last = self.number
        self.flags.raise_to(self.begun[self.rank], last + 1)
        for rank in self.others:
            self.flags.wait(self.begun[rank], last, rank)
        return self.take_turn(plan)

    def take_turn(self, plan: Plan[Views]) -> Views:
        """As `begin`, for turns in which all ranks meet, so that none is more than one ahead."""
        self._check_room(plan)
        self.number = number = self.number + 1
        self._hash = plan.hash
        note, words = self._notes[number % 2][self.rank], self.flags.words
        text = (note + 2) * WORD_BYTES
        self.flags.bytes[text : text + _TEXT_BYTES] = plan.text
        words[note + 1] = plan.hash
        words[note] = number
        if plan.memory is not self._halves or self._halves is None or self._retired:
            # A tensor that is made in inference mode could not be written to outside it.
            with torch.inference_mode(False):
                self._release()
                self._grow(plan.num_bytes, number)
                assert self._halves is not None, plan.text
                plan.lay_out(self._halves)
        return plan.views[number % 2]

    def meet(self) -> None:
        """Say that what this rank has written can be read, and wait for all others to say so."""
        self.flags.raise_to(self.values[self.rank], self.number)
        for rank in self.others:
            self.flags.wait(self.values[rank], self.number, rank)
            self.check(rank)

    def check(self, rank: int) -> None:
        """Whether `rank`, which has taken this turn, takes it for the same."""
        if self.flags.words[self._notes[self.number % 2][rank] + 1] != self._hash:
            self._compare()

    def _compare(self) -> None:
        """Raise if a rank takes this turn for something else."""
        notes, words = self._notes[self.number % 2], self.flags.words
        for rank in self.others:
            if words[notes[rank]] == self.number and words[notes[rank] + 1] != self._hash:
                raise TransportError(
                    f"{trace.identity()}: ranks are not in step: {self._read(self.rank)} here, but "
                    f"{self._read(rank)} on rank {self.flags.ranks[rank]}"
                )

    def _read(self, rank: int) -> str:
        start = (self._notes[self.number % 2][rank] + 2) * WORD_BYTES
        return bytes(self.flags.bytes[start : start + _TEXT_BYTES]).decode("ascii", "replace").rstrip()

    def _check_room(self, plan: Plan[Any]) -> None:
        """Whether as much was refused before: then no rank needs to be asked."""
        if self._refusal is not None and plan.num_bytes >= self._refused_bytes:
            raise self._refusal

    def _grow(self, num_bytes: int, number: int) -> None:
        """Have larger memory from turn `number` on, if this is too small."""
        if num_bytes <= self._capacity:
            return
        capacity = self._arena.round_up(num_bytes)
        try:
            whole = self._arena.extend(2 * capacity)
        except NoRoom as error:
            self._refused_bytes, self._refusal = num_bytes, error.with_traceback(None)
            raise
        if self._whole is not None:
            self._retired.append(_Retired(self._whole, number))
        self._whole, self._capacity = whole, capacity
        self._halves = whole[:capacity], whole[capacity:]

    def _release(self) -> None:
        """Let memory go that no rank can use any more: all have ended the last turn before it was replaced."""
        for retired in [each for each in self._retired if each.number < self.number]:
            self._arena.release(retired.memory)
            self._retired.remove(retired)


def _list_lines(first_word: int, num_lines: int) -> range:
    return range(first_word, first_word + num_lines * LINE_WORDS, LINE_WORDS)
