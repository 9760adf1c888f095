"""What this rank has issued: every collective while recording, the latest few always.

The latest are noted as bytes in a small buffer. A launcher puts that buffer into memory it shares with the rank, so that
the last collectives of a rank that was killed or hangs can still be read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from struct import Struct
from typing import Any, NamedTuple, Protocol

from plait.contract.collective import Collective, ReduceOp
from plait.sharding import Kind

HISTORY = 8
"""Collectives that are always remembered; what differs between ranks is nearly always the last one."""

_HEADER = Struct("<64sQ")
_ENTRY = Struct("<Q16s168s")
NOTES_BYTES = _HEADER.size + HISTORY * _ENTRY.size
"""Size of a buffer of notes."""

Notes = bytearray | mmap | memoryview


class Reach(Protocol):
    """What a trace needs to know of an axis."""

    name: str
    degree: int


class Issued(NamedTuple):
    """A collective and the name of the place that issued it."""

    collective: Collective
    label: str


class Noted(NamedTuple):
    """A remembered collective: the `number`-th that this rank issued on `axis`."""

    axis: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"#{self.number} on {self.axis}: {self.text}"


@dataclass
class Trace:
    """The collectives issued on this rank while recording, in order."""

    issued: list[Issued] = field(default_factory=list)

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
        self._notes: Notes = bytearray(NOTES_BYTES)
        self._counts: dict[str, int] = {}
        self._total = 0
        self._who = b""
        self._known: dict[tuple[Any, ...], tuple[Issued, bytes, bytes]] = {}

    def move_to(self, notes: Notes) -> None:
        notes[:NOTES_BYTES] = self._notes[:NOTES_BYTES]
        self._notes = notes

    def identify(self, who: str) -> None:
        self._who = who.encode()
        _HEADER.pack_into(self._notes, 0, self._who, self._total)

    def issue(self, key: tuple[Any, ...]) -> None:
        known = self._known.get(key) or self._describe(key)
        issued, axis, text = known
        number = self._counts[issued.collective.axis] = self._counts.get(issued.collective.axis, 0) + 1
        _ENTRY.pack_into(self._notes, _HEADER.size + self._total % HISTORY * _ENTRY.size, number, axis, text)
        self._total += 1
        _HEADER.pack_into(self._notes, 0, self._who, self._total)
        for trace in self.traces:
            trace.issued.append(issued)

    def _describe(self, key: tuple[Any, ...]) -> tuple[Issued, bytes, bytes]:
        """Built once for each kind, axis, shape and label: it would cost more than the rest of the wrapper."""
        kind, axis, degree, shape, dtype, dim, op, label = key
        collective = Collective(kind, axis, degree, tuple(shape), str(dtype).removeprefix("torch."), dim, op)  # type: ignore[arg-type]
        text = f"{collective} ({label})" if label else str(collective)
        if len(self._known) >= 4096:
            self._known.clear()
        known = self._known[key] = (Issued(collective, label), axis.encode(), text.encode("ascii", "replace"))
        return known

    def copy_notes(self) -> bytes:
        return bytes(self._notes[:NOTES_BYTES])


_recorder = _Recorder()


def issue(
    kind: Kind, axis: Reach, shape: tuple[int, ...], dtype: object, dim: int = 0, op: ReduceOp = "sum", label: str = ""
) -> None:
    """Note a collective that is about to be issued; `shape` is that of the whole tensor."""
    _recorder.issue((kind, axis.name, axis.degree, shape, dtype, dim, op, label))


@contextmanager
def record() -> Iterator[Trace]:
    """Collect every collective issued on this rank inside the block, from whichever thread."""
    trace = Trace()
    _recorder.traces.append(trace)
    try:
        yield trace
    finally:
        _recorder.traces = [other for other in _recorder.traces if other is not trace]


def last_collective() -> Noted | None:
    """The latest collective of this rank, recording or not."""
    noted = read_notes(copy_notes())[1]
    return noted[-1] if noted else None


def identify(who: str) -> None:
    """Say who this rank is (`rank 1 (dp=0 tp=1)`) in what others may read of it."""
    _recorder.identify(who)


def identity() -> str:
    """What `identify` was told last; empty before."""
    return read_notes(copy_notes())[0]


def move_notes(notes: Notes) -> None:
    """Keep the notes in `notes` from now on, memory that others can read."""
    _recorder.move_to(notes)


def copy_notes() -> bytes:
    """The notes as they are."""
    return _recorder.copy_notes()


def read_notes(notes: bytes) -> tuple[str, list[Noted]]:
    """Who wrote `notes`, and its latest collectives, oldest first."""
    who, total = _HEADER.unpack_from(notes)
    noted = []
    for index in range(max(0, total - HISTORY), total):
        number, axis, text = _ENTRY.unpack_from(notes, _HEADER.size + index % HISTORY * _ENTRY.size)
        noted.append(Noted(_decode(axis), number, _decode(text)))
    return _decode(who), noted


def _decode(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")
