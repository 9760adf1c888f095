"""Sessions whose tensors move message by message, over any link.

Rows of others come straight into the gathered tensor, addends into buffers. What really moved is recorded here.
"""

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.mesh import Axis
from plait.errors import ShardingError
from plait.overlap.transport.base import TAKE
from plait.overlap.transport.link import Link
from plait.overlap.transport.pool import Pool
from plait.schedule import direct
from plait.schedule.movement import Gather, Reduction
from plait.schedule.piece import Piece, build_pieces
from plait.schedule.step import Content, Flow, Message, Step
from plait.sharding import Interval, Kind


class PiecewiseGather:
    """Brings rows together.

    Attributes:
        full: `[T, width]`, fresh; the caller's to keep.
    """

    def __init__(self, flow: Flow, x_shard: Tensor, axis: Axis, link: Link, label: str) -> None:
        _check_shard(flow, x_shard, axis, label)
        self.flow = flow
        self._axis = axis
        self._link = link
        self._label = label
        self.full = x_shard.new_empty(flow.split.size, x_shard.shape[1])
        _cut(self.full, flow.split.intervals[axis.rank]).copy_(x_shard)

    def recv(self, message: Message) -> None:
        self._link.recv(message, _cut(self.full, message.piece.rows))

    def send(self, message: Message) -> None:
        rows = _cut(self.full, message.piece.rows)
        self._link.send(message, rows)
        trace.note_sent(message, rows.nbytes, self._label)

    def wait(self, message: Message) -> None:
        self._link.wait(message)
        trace.note_received(message, _cut(self.full, message.piece.rows).nbytes, self._label)

    def flush(self) -> None:
        self._link.flush(self.flow.tensor)

    def collect(self) -> None:
        self.note()
        with trace.aside():  # in a trace it is the one collective that it stands for
            _move_at_once(self, self.flow, self._axis.rank)

    def note(self) -> None:
        """Note the collective that the pieces amount to."""
        trace.issue(self.flow.kind, self._axis, self.full.shape, self.full.dtype, 0, "sum", self._label)


class PiecewiseReduce:
    """Brings addends together and sums them in the order of the schedule.

    Addends travel in the dtype in which they are summed, the sums of an all-reduce in the dtype of the result.

    Attributes:
        partial: `[T, width]`, of the pool: not to be used after `flush`.
        total: fresh.
    """

    def __init__(self, flow: Flow, partial: Tensor, axis: Axis, link: Link, pool: Pool, label: str) -> None:
        self._flow = flow
        self._axis = axis
        self._link = link
        self._pool = pool
        self._label = label
        self.partial = partial
        dtype = partial.dtype
        self._carrier = (axis.reduce_dtype or dtype) if dtype.is_floating_point else dtype
        is_everywhere = flow.kind is Kind.ALL_REDUCE
        self._kept = Interval(0, flow.split.size) if is_everywhere else flow.split.intervals[axis.rank]
        self.total = partial.new_empty(len(self._kept), partial.shape[1])
        self._lent = [partial]
        self._received: dict[tuple[int, int], Tensor] = {}
        """Addends by first row and source."""
        self._sums: dict[int, Tensor] = {}
        """Sums to be sent on, by first row."""

    def recv(self, message: Message) -> None:
        if message.content is Content.VALUE:
            room = self._total_rows(message.piece)
        else:
            room = self._take(message.piece)
            self._received[message.piece.rows.start, message.source] = room
        self._link.recv(message, room)

    def send(self, message: Message) -> None:
        piece = message.piece
        if message.content is Content.VALUE:
            rows = self._total_rows(piece)
        elif (rows_or_none := self._sums.get(piece.rows.start)) is not None:
            rows = rows_or_none
        else:
            rows = self._own_addend(piece)
        self._link.send(message, rows)
        trace.note_sent(message, rows.nbytes, self._label)

    def wait(self, message: Message) -> None:
        self._link.wait(message)
        is_value, rows = message.content is Content.VALUE, message.piece.rows
        arrived = self._total_rows(message.piece) if is_value else self._received[rows.start, message.source]
        trace.note_received(message, arrived.nbytes, self._label)

    def add(self, piece: Piece, ranks: tuple[int, ...]) -> None:
        addends = [
            self._own_addend(piece) if rank == self._axis.rank else self._received[piece.rows.start, rank]
            for rank in ranks
        ]
        is_owner = piece.owner == self._axis.rank
        # An addend that was received is nobody else's, and one of the first two is: the sum may overwrite it.
        target = addends[1] if ranks[0] == self._axis.rank else addends[0]
        if is_owner and self._carrier is self.total.dtype:
            target = self._total_rows(piece)
        torch.add(addends[0], addends[1], out=target)
        for addend in addends[2:]:
            target.add_(addend)
        if not is_owner:
            self._sums[piece.rows.start] = target
        elif self._carrier is not self.total.dtype:
            self._total_rows(piece).copy_(target)

    def flush(self) -> None:
        self._link.flush(self._flow.tensor)
        for buffer in self._lent:
            self._pool.give_back(buffer)
        self._lent.clear()
        self._received.clear()
        self._sums.clear()

    def collect(self) -> None:
        trace.issue(self._flow.kind, self._axis, self.partial.shape, self._carrier, 0, "sum", self._label)
        with trace.aside():  # in a trace it is the one collective that it stands for
            _move_at_once(self, self._flow, self._axis.rank)

    def _own_addend(self, piece: Piece) -> Tensor:
        """The own rows in the dtype in which sums are carried."""
        rows = _cut(self.partial, piece.rows)
        return rows if self._carrier is rows.dtype else self._take(piece).copy_(rows)

    def _total_rows(self, piece: Piece) -> Tensor:
        return self.total[piece.rows.start - self._kept.start : piece.rows.stop - self._kept.start]

    def _take(self, piece: Piece) -> Tensor:
        buffer = self._pool.take(len(piece.rows), self.partial.shape[1], self._carrier, self.partial.device)
        self._lent.append(buffer)
        return buffer


def _move_at_once(session: PiecewiseGather | PiecewiseReduce, flow: Flow, rank: int) -> None:
    """Move all of a tensor, each owner's rows in one message, and wait for it: the same links without any overlap."""
    for step in _list_steps(flow, rank):
        TAKE[type(step)]({flow.tensor: session}, step)
    session.flush()


def _list_steps(flow: Flow, rank: int) -> list[Step]:
    pieces = build_pieces(flow.split, 1)
    rounds = range(pieces.num_rounds)
    reduction, gather = Reduction((), (), ()), Gather((), (), ())
    if flow.kind is not Kind.ALL_GATHER:
        reduction = direct.build_reduction(flow.tensor, pieces, rank, rounds)
    if flow.kind is not Kind.REDUCE_SCATTER:
        gather = direct.build_gather(flow.tensor, pieces, rank, range(rounds.stop, 2 * rounds.stop))
    return [
        *reduction.recvs,
        *gather.recvs,
        *(step for _, after in (*reduction.others, *reduction.own) for step in after),
        *gather.sends,
        *(step for _, arrive in gather.arrivals for step in arrive),
    ]


def _cut(x: Tensor, rows: Interval) -> Tensor:
    return x[rows.start : rows.stop]


def _check_shard(flow: Flow, x_shard: Tensor, axis: Axis, label: str) -> None:
    own = flow.split.intervals[axis.rank]
    if x_shard.ndim != 2 or x_shard.shape[0] != len(own):
        raise ShardingError(
            f"{label}: rank {axis.rank} on {axis.name!r} of degree {axis.degree} has {flow.tensor} of "
            f"{list(x_shard.shape)}, but its rows of {flow.split.size} are {own}"
        )
