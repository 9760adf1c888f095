"""What this rank has issued: every collective and every message of one while recording, the latest collectives always;
and how long it has waited for others.

The latest are noted as bytes in a small buffer. A launcher puts that buffer into memory that it shares with the rank,
so that the last collectives of a rank that was killed or hangs can still be read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from struct import Struct
from typing import Any, Literal, NamedTuple, Protocol, cast

from plait.contract.collective import Collective, ReduceOp
from plait.contract.pipeline.transfer import Transfer
from plait.dtype import DType
from plait.schedule.step import Message
from plait.sharding import Kind

HISTORY = 8
"""Collectives that are always remembered; what differs between ranks is nearly always the last one."""

_WHO = Struct("<64s")
_ENTRY = Struct("<QQI16s156s")
NOTES_BYTES = _WHO.size + HISTORY * _ENTRY.size
"""Size of a buffer of notes."""

_MAX_KNOWN = 4096

Notes = bytearray | mmap | memoryview


class Reach(Protocol):
    """What a trace needs to know of an axis."""

    @property
    def name(self) -> str: ...

    @property
    def degree(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


class Issued(NamedTuple):
    """A collective and the name of the place that issued it."""

    collective: Collective
    label: str


class Moved(NamedTuple):
    """A message of a schedule that this rank sent or has received: the bytes that did move, and for whom."""

    direction: Literal["sent", "received"]
    message: Message
    num_bytes: int
    label: str


class Noted(NamedTuple):
    """A remembered collective: the `number`-th that this rank issued on `axis`, in the group of `first_rank`."""

    axis: str
    first_rank: int
    number: int
    text: str

    def __str__(self) -> str:
        return f"#{self.number} on {self.axis}: {self.text}"


@dataclass
class Trace:
    """What was issued on this rank while recording, in order.

    Attributes:
        moved: the messages of overlapped collectives, sent ones when they set off, received ones when waited for.
        transferred: what stages of a pipeline sent, and what they received when they worked on it.
    """

    issued: list[Issued] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    transferred: list[Transfer] = field(default_factory=list)

    @property
    def collectives(self) -> list[Collective]:
        """Without their labels, to be compared with a contract."""
        return [entry.collective for entry in self.issued]

    @property
    def labels(self) -> list[str]:
        """Where each was issued."""
        return [entry.label for entry in self.issued]


class _Recorder:
    """Notes of one rank. There is one of them per process, as there is one order in which a process issues."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self.notes: Notes = bytearray(NOTES_BYTES)
        self.waited_s = 0.0
        self._total = 0
        self._counts: dict[str, int] = {}
        self._known: dict[tuple[Any, ...], tuple[Issued, int, bytes, bytes]] = {}

    def issue(
        self, kind: Kind, axis: Reach, shape: tuple[int, ...], dtype: object, dim: int, op: ReduceOp, label: str
    ) -> None:
        """Note a collective that is about to be issued; `shape` is that of the whole tensor."""
        name = axis.name
        key = (kind._value_, name, axis.degree, axis.ranks[0], shape, dtype, dim, op, label)
        known = self._known.get(key)
        issued, first_rank, axis_bytes, text = self._describe(key) if known is None else known
        self._note(name, first_rank, axis_bytes, text)
        for trace in self.traces:
            trace.issued.append(issued)

    def note_ring(self, axis: Reach, text: str) -> None:
        """Remember that messages begin to go round `axis`, on all its ranks: no collective, so in no trace."""
        self._note(axis.name, axis.ranks[0], axis.name.encode(), text.encode("ascii", "replace"))

    def note_wish(self, axis: str, rank: int, text: str) -> None:
        """Remember what global rank `rank` is about to send or to wait for, alone: no other rank does the same."""
        self._note(axis, rank, axis.encode(), text.encode("ascii", "replace"))

    def note_transfer(self, transfer: Transfer) -> None:
        """Record what a stage of a pipeline has sent or received."""
        for trace in self.traces:
            trace.transferred.append(transfer)

    def note_sent(self, message: Message, num_bytes: int, label: str) -> None:
        """Record a message that has set off; for the transports of overlapped collectives."""
        for trace in self.traces:
            trace.moved.append(Moved("sent", message, num_bytes, label))

    def note_received(self, message: Message, num_bytes: int, label: str) -> None:
        """Record a message that has arrived and was waited for."""
        for trace in self.traces:
            trace.moved.append(Moved("received", message, num_bytes, label))

    def note_wait(self, wait_s: float) -> None:
        """Add a wait for other ranks, for what they do and what they send."""
        self.waited_s += wait_s

    def forget(self) -> None:
        """Count and remember afresh."""
        self._counts.clear()
        self.notes[_WHO.size : NOTES_BYTES] = bytes(NOTES_BYTES - _WHO.size)

    def _note(self, name: str, first_rank: int, axis_bytes: bytes, text: bytes) -> None:
        self._counts[name] = number = self._counts.get(name, 0) + 1
        self._total = total = self._total + 1
        offset = _WHO.size + total % HISTORY * _ENTRY.size
        _ENTRY.pack_into(self.notes, offset, total, number, first_rank, axis_bytes, text)

    def _describe(self, key: tuple[Any, ...]) -> tuple[Issued, int, bytes, bytes]:
        """Built once for each kind, axis, shape and label: it would cost more than the rest of the wrapper."""
        kind, axis, degree, first_rank, shape, dtype, dim, op, label = key
        dtype_name = cast(DType, str(dtype).removeprefix("torch."))
        collective = Collective(Kind(kind), axis, degree, tuple(shape), dtype_name, dim, op)
        text = f"{collective} ({label})" if label else str(collective)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        known = (Issued(collective, label), first_rank, axis.encode(), text.encode("ascii", "replace"))
        self._known[key] = known
        return known


_recorder = _Recorder()
issue = _recorder.issue
note_sent = _recorder.note_sent
note_received = _recorder.note_received
note_ring = _recorder.note_ring
note_wish = _recorder.note_wish
note_transfer = _recorder.note_transfer
note_wait = _recorder.note_wait


@contextmanager
def record() -> Iterator[Trace]:
    """Collect what is issued on this rank inside the block, from whichever thread."""
    trace = Trace()
    _recorder.traces.append(trace)
    try:
        yield trace
    finally:
        _recorder.traces = [other for other in _recorder.traces if other is not trace]


@contextmanager
def aside() -> Iterator[None]:
    """Keep what is issued inside the block out of every trace: it is no part of what a contract promises.

    It is counted and remembered as ever.
    """
    traces, _recorder.traces = _recorder.traces, []
    try:
        yield
    finally:
        _recorder.traces = traces


def last_collective() -> Noted | None:
    """The latest collective of this rank, recording or not."""
    _, noted = read_notes(copy_notes())
    return noted[-1] if noted else None


def waited_s() -> float:
    """How long this rank has waited for others so far; what a CUDA device waits is not in it."""
    return _recorder.waited_s


def identify(who: str) -> None:
    """Say who this rank is (`rank 1 (dp=0 tp=1)`) in what others may read of it."""
    _WHO.pack_into(_recorder.notes, 0, who.encode())


def identity() -> str:
    """What `identify` was told last; empty before."""
    return read_notes(copy_notes())[0]


def forget() -> None:
    """Count and remember collectives afresh; what ranks did before is not to be compared with what they do now."""
    _recorder.forget()


def move_notes(notes: Notes) -> None:
    """Keep the notes in `notes` from now on, memory that others can read."""
    notes[:NOTES_BYTES] = copy_notes()
    _recorder.notes = notes


def copy_notes() -> bytes:
    """The notes as they are."""
    return bytes(_recorder.notes[:NOTES_BYTES])


def read_notes(notes: bytes) -> tuple[str, list[Noted]]:
    """Who wrote `notes`, and its latest collectives, oldest first."""
    entries = sorted(_ENTRY.iter_unpack(notes[_WHO.size :]))
    noted = [
        Noted(_decode(axis), first_rank, number, _decode(text))
        for total, number, first_rank, axis, text in entries
        if total
    ]
    return _decode(notes[: _WHO.size]), noted


def _decode(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")
