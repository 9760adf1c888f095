"""Shared memory between CPU ranks of one host: rows are read where they were written, and flags say when.

A gathered tensor exists once for all ranks, each of which writes its own rows. Addends stay where the GEMM puts them;
who owns a piece sums it from there, in rank order. A flag says up to which row its owner's rows can be read, so ranks
whose pieces differ still read nothing too early.
"""

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.mesh import Axis
from plait.comm.shared.channel import Channel, Plan
from plait.comm.shared.collectives import SLICED_BYTES, combine
from plait.errors import ScheduleError, ShardingError
from plait.overlap.transport.base import Capability
from plait.schedule.piece import Piece
from plait.schedule.step import Content, Flow, Message, Method
from plait.sharding import Interval, Kind

_TURN, _ROW = 1 << 32, 1 << 8
"""A flag is a turn's number times the one, the first row that cannot be read yet times the other, and the number's last
digits: a sleeper is kept awake by a change of the lower 32 bits only, and turns of as many rows would have the same.
There are as many turns: at 20 us each, a day of nothing else."""

_MOST_ROWS = _TURN // _ROW - 1
"""What a flag can count."""

_MAX_KNOWN = 1024

SessionT = TypeVar("SessionT")

_Key = tuple[int, int, torch.dtype, str]


def describe_lack(axis: Axis) -> str | None:
    """Why the ranks of `axis` cannot use shared memory; None if they can. All of them get the same answer."""
    return axis.unshared_because if axis.shared is None else None


class SharedMemoryTransport:
    """Sessions in the memory that an axis shares."""

    capability = Capability("shm", frozenset({"cpu"}), frozenset({Method.NONE, Method.BULK, Method.DIRECT}), True)
    keeps_memory = True

    def __init__(self, axis: Axis) -> None:
        assert axis.shared is not None, axis.unshared_because
        self.axis = axis
        self._gather, self._reduce = axis.shared.gather, axis.shared.reduce
        self._gathers: dict[_Key, _Gather] = {}
        self._reduces: dict[_Key, _Reduce] = {}

    def reserve(self, flow: Flow, width: int, dtype: torch.dtype, label: str) -> str | None:
        """Have the memory to move `flow`; why there is none. All ranks have to call it, before they open anything."""
        if flow.split.size > _MOST_ROWS:
            return f"its flags count up to {_MOST_ROWS} rows, and there are {flow.split.size}"
        if flow.kind is Kind.ALL_GATHER:
            return self._gather.reserve(self._find_gather(flow, width, dtype, label).plan)
        return self._reduce.reserve(self._find_reduce(flow, width, dtype, label).plan)

    def open_gather(self, flow: Flow, x_shard: Tensor, label: str) -> "_Gather":
        """Begin to gather `x_shard`, the own rows.

        Raises:
            NoRoom: on all ranks, for want of memory that was not reserved.
        """
        session = self._find_gather(flow, x_shard.shape[1], x_shard.dtype, label)
        session.open(x_shard)
        return session

    def open_reduce(self, flow: Flow, width: int, dtype: torch.dtype, device: torch.device, label: str) -> "_Reduce":
        """Begin to reduce rows of `width` elements in `dtype`.

        Raises:
            NoRoom: on all ranks, for want of memory that was not reserved.
        """
        assert device.type == "cpu", device
        session = self._find_reduce(flow, width, dtype, label)
        session.open()
        return session

    def _find_gather(self, flow: Flow, width: int, dtype: torch.dtype, label: str) -> "_Gather":
        key = (id(flow), width, dtype, label)
        session = self._gathers.get(key)
        if session is None:
            _make_room(self._gathers)
            self._gathers[key] = session = _Gather(self.axis, self._gather, flow, width, dtype, label)
        return session

    def _find_reduce(self, flow: Flow, width: int, dtype: torch.dtype, label: str) -> "_Reduce":
        key = (id(flow), width, dtype, label)
        session = self._reduces.get(key)
        if session is None:
            _make_room(self._reduces)
            self._reduces[key] = session = _Reduce(self.axis, self._reduce, flow, width, dtype, label)
        return session


class _Session:
    """One tensor, run after run: what a run needs is made once, as a small block takes hardly longer than making it."""

    def __init__(self, axis: Axis, channel: Channel, flow: Flow, label: str, row_bytes: int) -> None:
        assert flow.split.size <= _MOST_ROWS, (label, flow)
        self._axis, self._rank = axis, axis.rank
        self._channel, self._flags = channel, channel.flags
        self._flow, self._label, self._row_bytes = flow, label, row_bytes
        self._intervals = flow.split.intervals
        self._own = self._intervals[axis.rank]
        self._turn = 0

    def recv(self, message: Message) -> None:
        """There is room for everything."""

    def flush(self) -> None:
        """What was written stays; it is overwritten in the next run but one, when nobody reads it any more."""

    def _publish(self, word: int, rows: Interval, first: int) -> None:
        """Raise a flag, whose rows begin with `first`, to the end of `rows`, if it was not raised for another rank."""
        before, value = self._flags.words[word], self._turn + rows.stop * _ROW
        if before >= value:
            return
        if before != self._turn + rows.start * _ROW and rows.start != first:
            raise ScheduleError(f"{self._label}: {self._flow.tensor}[{rows}] was sent before the rows ahead of it")
        self._flags.raise_to(word, value)

    def _wait(self, word: int, rows: Interval, rank: int) -> None:
        self._flags.wait(word, self._turn + rows.stop * _ROW, rank)
        self._channel.check(rank)

    def _note_sent(self, message: Message) -> None:
        trace.note_sent(message, len(message.piece.rows) * self._row_bytes, self._label)

    def _note_received(self, message: Message) -> None:
        trace.note_received(message, len(message.piece.rows) * self._row_bytes, self._label)

    def _plan_text(self, width: int, dtype: torch.dtype) -> str:
        cut = ", ".join(map(str, self._intervals))
        return f"{self._flow.kind} {self._flow.tensor} ({self._label}): [{cut}] x {width} {dtype}"


class _Gather(_Session):
    """Attributes: full is in shared memory, overwritten in the next run but one."""

    full: Tensor

    def __init__(self, axis: Axis, channel: Channel, flow: Flow, width: int, dtype: torch.dtype, label: str) -> None:
        super().__init__(axis, channel, flow, label, width * dtype.itemsize)
        text, shape = self._plan_text(width, dtype), (flow.split.size, width)
        self.plan = Plan(text, [shape], dtype, partial(_add_own, self._own), flow)

    def open(self, x_shard: Tensor) -> None:
        """Begin a run."""
        if x_shard.ndim != 2 or x_shard.shape[0] != len(self._own):
            raise ShardingError(
                f"{self._label}: rank {self._rank} on {self._axis.name!r} of degree {self._axis.degree} has "
                f"{self._flow.tensor} of {list(x_shard.shape)}, but its rows of {self._flow.split.size} are {self._own}"
            )
        self.full, own = self._channel.begin(self.plan)
        self._turn = self._channel.number * _TURN + self._channel.number % _ROW
        own.copy_(x_shard)

    def send(self, message: Message) -> None:
        self._publish(self._channel.values[self._rank], message.piece.rows, self._own.start)
        self._note_sent(message)

    def wait(self, message: Message) -> None:
        self._wait(self._channel.values[message.source], message.piece.rows, message.source)
        self._note_received(message)

    def collect(self) -> None:
        flow = self._flow
        trace.issue(flow.kind, self._axis, self.full.shape, self.full.dtype, 0, "sum", self._label)
        self._publish(self._channel.values[self._rank], self._own, self._own.start)
        for rank in self._channel.others:
            self._wait(self._channel.values[rank], self._intervals[rank], rank)


def _add_own(own: Interval, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A gathered tensor and its own rows."""
    (full,) = tensors
    return full, full[own.start : own.stop]


class _Half:
    """Half of a channel's memory during a reduction.

    Attributes:
        addends: `[T, width]` of each rank.
        sums: `[T, width]` that owners have summed for all; of an all-reduce.
    """

    def __init__(self, tensors: list[Tensor], degree: int) -> None:
        self.addends, self.sums = tensors[:degree], tensors[degree] if len(tensors) > degree else None
        self._cut: dict[tuple[int, int], list[Tensor]] = {}

    def cut(self, rows: Interval) -> list[Tensor]:
        """Some rows of each rank's addends, then of the sums."""
        key = (rows.start, rows.stop)
        if key not in self._cut:
            whole = self.addends if self.sums is None else [*self.addends, self.sums]
            self._cut[key] = [tensor[rows.start : rows.stop] for tensor in whole]
        return self._cut[key]


class _Reduce(_Session):
    """Attributes: partial is in shared memory, total is fresh."""

    partial: Tensor
    total: Tensor

    def __init__(self, axis: Axis, channel: Channel, flow: Flow, width: int, dtype: torch.dtype, label: str) -> None:
        super().__init__(axis, channel, flow, label, width * dtype.itemsize)
        self._carrier = (axis.reduce_dtype or dtype) if dtype.is_floating_point else dtype
        self._is_everywhere = flow.kind is Kind.ALL_REDUCE
        self._kept = Interval(0, flow.split.size) if self._is_everywhere else self._own
        self._half: _Half
        shapes = [(flow.split.size, width)] * (axis.degree + self._is_everywhere)
        self.plan = Plan(
            f"{self._plan_text(width, dtype)} in {self._carrier}",
            shapes,
            dtype,
            partial(_Half, degree=axis.degree),
            flow,
        )

    def open(self) -> None:
        """Begin a run."""
        self._half = half = self._channel.begin(self.plan)
        self._turn = self._channel.number * _TURN + self._channel.number % _ROW
        self.partial = half.addends[self._rank]
        self.total = self.partial.new_empty(len(self._kept), self.partial.shape[1])

    def send(self, message: Message) -> None:
        piece = message.piece
        word = self._word(message.content, self._rank, message.target)
        self._publish(word, piece.rows, self._intervals[piece.owner].start)
        self._note_sent(message)

    def wait(self, message: Message) -> None:
        rows = message.piece.rows
        self._wait(self._word(message.content, message.source, self._rank), rows, message.source)
        if message.content is Content.VALUE:
            self._rows_of_total(rows).copy_(self._half.cut(rows)[-1])
        self._note_received(message)

    def add(self, piece: Piece, ranks: tuple[int, ...]) -> None:
        rows = piece.rows
        cut, total = self._half.cut(rows), self._rows_of_total(rows)
        self._sum([cut[rank] for rank in ranks], total)
        if self._is_everywhere:
            cut[-1].copy_(total)

    def collect(self) -> None:
        flow = self._flow
        trace.issue(flow.kind, self._axis, self.partial.shape, self._carrier, 0, "sum", self._label)
        if self._is_everywhere and (self._axis.degree == 2 or self.partial.nbytes < SLICED_BYTES):
            self._sum_everywhere()
            return
        own, others = self._own, self._channel.others
        for rank in others:
            rows = self._intervals[rank]
            self._publish(self._word(Content.ADDEND, self._rank, rank), rows, rows.start)
        for rank in others:
            self._wait(self._word(Content.ADDEND, rank, self._rank), own, rank)
        self.add(Piece(self._rank, 0, own), tuple(range(self._axis.degree)))
        if not self._is_everywhere:
            return
        self._publish(self._channel.values[self._rank], own, own.start)
        for rank in others:
            rows = self._intervals[rank]
            self._wait(self._channel.values[rank], rows, rank)
            self._rows_of_total(rows).copy_(self._half.cut(rows)[-1])

    def _sum_everywhere(self) -> None:
        """Sum all rows for this rank alone: one wait instead of two, and for two ranks no more to read and write."""
        values = self._channel.values
        self._publish(values[self._rank], self._kept, 0)
        for rank in self._channel.others:
            self._wait(values[rank], self._kept, rank)
        self._sum(self._half.addends, self.total)

    def _word(self, content: Content, source: int, target: int) -> int:
        """The flag of a message: a sum is for all, an addend for the owner of its rows."""
        return self._channel.values[source] if content is Content.VALUE else self._channel.addends[source][target]

    def _sum(self, addends: list[Tensor], total: Tensor) -> None:
        if self._carrier is total.dtype:
            combine(addends, out=total)
        else:
            total.copy_(combine([addend.to(self._carrier) for addend in addends]))

    def _rows_of_total(self, rows: Interval) -> Tensor:
        start = rows.start - self._kept.start
        return self.total if len(rows) == len(self._kept) else self.total[start : start + len(rows)]


def _make_room(sessions: dict[_Key, SessionT]) -> None:
    """Let all go when labels and sizes keep changing: the views they hold keep memory alive."""
    if len(sessions) >= _MAX_KNOWN:
        sessions.clear()
