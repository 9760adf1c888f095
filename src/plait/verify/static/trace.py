"""Compares what a rank issued with what was promised: collectives with its contract, messages with its schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from plait.contract.collective import Collective
from plait.contract.pipeline.transfer import Transfer
from plait.schedule.context import RingProgram
from plait.schedule.step import Message, Program, Send, Wait

T = TypeVar("T")

_CONTEXT = 2
"""Collectives shown before the first difference: enough to find the place in the model."""


@dataclass(frozen=True)
class TraceDifference:
    """The first place where a trace leaves its contract; a side that had ended already is None.

    Attributes:
        index: position in both lists.
        before: what both sides agreed on just before.
    """

    index: int
    promised: Collective | None
    issued: Collective | None
    before: tuple[Collective, ...]
    num_promised: int
    num_issued: int

    @property
    def fields(self) -> tuple[str, ...]:
        """What differs: names of fields of `Collective`; empty where one side has ended."""
        if self.promised is None or self.issued is None:
            return ()
        names = ("kind", "axis", "degree", "shape", "dtype", "dim", "op")
        return tuple(name for name in names if getattr(self.promised, name) != getattr(self.issued, name))

    def __str__(self) -> str:
        what = f"differs in {', '.join(self.fields)}" if self.fields else "is missing" if self.promised else "is extra"
        lines = [f"collective {self.index} {what} ({self.num_promised} promised, {self.num_issued} issued)"]
        first = self.index - len(self.before)
        lines += [f"  {first + offset:4}  both      {agreed}" for offset, agreed in enumerate(self.before)]
        lines.append(f"  {self.index:4}  promised  {_show(self.promised)}")
        lines.append(f"  {self.index:4}  issued    {_show(self.issued)}")
        return "\n".join(lines)


def find_difference(promised: Sequence[Collective], issued: Sequence[Collective]) -> TraceDifference | None:
    """The first difference between a contract and a trace, or None."""
    for index in range(max(len(promised), len(issued))):
        promise = promised[index] if index < len(promised) else None
        issue = issued[index] if index < len(issued) else None
        if promise != issue:
            before = tuple(promised[max(0, index - _CONTEXT) : index])
            return TraceDifference(index, promise, issue, before, len(promised), len(issued))
    return None


Moved = tuple[str, Message]
"""A message and whether it was `sent` or `received`."""


def list_promised_messages(programs: Sequence[Program | RingProgram]) -> list[Moved]:
    """What `programs`, run one after the other, send and wait for, in order."""
    return [
        ("sent" if isinstance(step, Send) else "received", step.message)
        for program in programs
        for step in program.steps
        if isinstance(step, Send | Wait)
    ]


def find_message_difference(promised: Sequence[Moved], moved: Sequence[Moved]) -> str | None:
    """The first difference between schedules and the messages that moved, in one line, or None."""
    return _find_first(promised, moved, lambda each: f"{each[0]} {each[1]}")


def find_transfer_difference(promised: Sequence[Transfer], moved: Sequence[Transfer]) -> str | None:
    """The first difference between what stages of a pipeline promised and what they moved, in one line, or None."""
    return _find_first(promised, moved, str)


def _find_first(promised: Sequence[T], moved: Sequence[T], show: Callable[[T], str]) -> str | None:
    for index in range(max(len(promised), len(moved))):
        promise = promised[index] if index < len(promised) else None
        move = moved[index] if index < len(moved) else None
        if promise != move:
            first, second = ("nothing" if each is None else show(each) for each in (promise, move))
            return f"message {index} of {len(promised)} promised, {len(moved)} moved: {first} promised, {second}"
    return None


def _show(collective: Collective | None) -> str:
    return "(nothing)" if collective is None else str(collective)
