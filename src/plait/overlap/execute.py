"""The one interpreter of schedules: takes the steps of a program in order, over whatever transport."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.mesh import Axis
from plait.overlap.agree import Row, check_same_schedule
from plait.overlap.site import Pass
from plait.overlap.transport.base import TAKE, GatherSession, ReduceSession, Transport
from plait.overlap.transport.piecewise import PiecewiseGather
from plait.overlap.transport.ring import RingTransport
from plait.schedule.step import Collect, Flow, Flush, Method, Multiply, Program, Step, Wait
from plait.sharding import Interval, Kind


class Rows(Protocol):
    """A GEMM that is computed some rows at a time."""

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        """Compute `rows`: from the gathered `full` where it reads that, into `partial` where others sum it."""


class Addends(NamedTuple):
    """The rows that are to be reduced: `[T, width]`."""

    width: int
    dtype: torch.dtype
    device: torch.device


class Start(NamedTuple):
    """A gather to be begun for the next run.

    Attributes:
        shard: its own rows.
        label: of the pass that it is for.
    """

    shard: Tensor
    label: str


class Outcome(NamedTuple):
    """What a run gives.

    Attributes:
        full: the gathered tensor, `[T, width]`; good until the next run where `is_lent`.
        is_lent: whether the gathered tensor is memory of the transport.
        total: what the reduction gives.
        exposed_s: how long the host waited for others; None where one operation does it all.
    """

    full: Tensor | None
    is_lent: bool
    total: Tensor | None
    exposed_s: float | None

    def keep_full(self) -> Tensor | None:
        """The gathered tensor as one's own."""
        return self.full.clone() if self.full is not None and self.is_lent else self.full


class Observer(Protocol):
    """Told of every step that was taken, for a timeline."""

    def note(self, step: Step, start_s: float, end_s: float) -> None: ...


class Instrument(Observer, Protocol):
    """What a benchmark puts between the passes and their steps."""

    def enter(self, what: Pass, gemms: Mapping[str, Rows]) -> Mapping[str, Rows]:
        """Told of a run that begins; what it returns is what the run multiplies with."""

    def leave(self) -> None:
        """Told that the run has ended."""


class Sessions(NamedTuple):
    """What moves in one run.

    Attributes:
        ahead: the gather that is begun for the next run.
    """

    gather: GatherSession | None
    reduce: ReduceSession | None
    ahead: PiecewiseGather | None
    by_tensor: Mapping[str, Any]


_NOTHING_MOVES = Sessions(None, None, None, {})


def execute(
    program: Program,
    transport: Transport,
    *,
    gemms: Mapping[str, Rows],
    shard: Tensor | None = None,
    addends: Addends | None = None,
    label: str = "",
    observer: Observer | None = None,
) -> Outcome:
    """Run `program` on this rank; all ranks of the axis have to, with programs of one schedule.

    `shard` is what is gathered, the own rows `[T/tp, width]`; `addends` says what is reduced.
    """
    if program.flows:
        check_agreement(program, transport.capability.name, transport.axis, shard, addends, label)
    return take_steps(program, transport, gemms, open_sessions(program, transport, shard, addends, label), observer)


def open_sessions(
    program: Program,
    transport: Transport,
    shard: Tensor | PiecewiseGather | None,
    addends: Addends | None,
    label: str,
    start: Start | None = None,
) -> Sessions:
    """Begin with all that moves: `shard` may have been begun before, `start` is what is begun for later."""
    if not program.flows and program.ahead is None:
        return _NOTHING_MOVES
    gather: GatherSession | None = None
    reduce: ReduceSession | None = None
    by_tensor: dict[str, Any] = {}
    for flow in program.flows:
        if flow.kind is not Kind.ALL_GATHER:
            assert addends is not None, (label, flow)
            _issue(program, transport, flow, addends.width, transport.axis.reduce_dtype or addends.dtype, label)
            reduce = transport.open_reduce(flow, addends.width, addends.dtype, addends.device, label)
            by_tensor[flow.tensor] = reduce
        elif isinstance(shard, PiecewiseGather):
            # Not when it is begun: the passes between may have to agree on something first, as contracts say.
            shard.note()
            by_tensor[flow.tensor] = gather = shard
        else:
            assert shard is not None, (label, flow)
            _issue(program, transport, flow, shard.shape[1], shard.dtype, label)
            by_tensor[flow.tensor] = gather = transport.open_gather(flow, shard, label)
    ahead = None
    if program.ahead is not None:
        assert start is not None, (label, program.ahead)
        assert isinstance(transport, RingTransport), (label, transport)
        flow = program.ahead.flow
        by_tensor[flow.tensor] = ahead = transport.begin_ahead(flow, start.shard, start.label)
    return Sessions(gather, reduce, ahead, by_tensor)


def take_steps(
    program: Program,
    transport: Transport,
    gemms: Mapping[str, Rows],
    sessions: Sessions,
    observer: Observer | None = None,
) -> Outcome:
    """Take the steps of `program`, in order."""
    gather, reduce, by_tensor = sessions.gather, sessions.reduce, sessions.by_tensor
    partial, exposed_s = reduce.partial if reduce else None, 0.0
    for step in program.steps:
        kind = type(step)
        is_wait = kind in _WAITS
        start_s = perf_counter() if is_wait or observer is not None else 0.0
        if isinstance(step, Multiply):
            # Asked for each time: what a library gathered is a tensor of its own.
            full = gather.full if gather is not None else None
            gemms[step.gemm](step.rows, full, partial, accumulates=step.accumulates)
        else:
            TAKE[kind](by_tensor, step)
        if is_wait:
            exposed_s += perf_counter() - start_s
        if observer is not None:
            observer.note(step, start_s, perf_counter())
    total = None
    if reduce is not None:
        total = reduce.total
        # It is the caller's: a session that is kept for the next run would keep what autograd makes of it, and that
        # keeps the model, in a circle that no collector sees.
        del reduce.total
    return Outcome(gather.full if gather else None, transport.keeps_memory, total, exposed_s)


def check_agreement(
    program: Program,
    transport: str,
    axis: Axis,
    shard: Tensor | None,
    addends: Addends | None,
    label: str,
    ahead_shard: Tensor | None = None,
) -> None:
    """Compare what is about to run, and what is begun for the next run, with the other ranks of `axis`.

    See `plait.overlap.agree`.
    """
    rows: list[Row] = []
    for flow in program.flows:
        if flow.kind is Kind.ALL_GATHER:
            assert shard is not None, (label, flow)
            rows.append((shard.shape[1], shard.dtype))
        else:
            assert addends is not None, (label, flow)
            rows.append((addends.width, addends.dtype))
    if ahead_shard is not None:
        rows.append((ahead_shard.shape[1], ahead_shard.dtype))
    device = shard.device if shard is not None else addends.device if addends is not None else torch.device("cpu")
    check_same_schedule(program, tuple(rows), transport, axis, device, label)


_WAITS = frozenset((Wait, Flush, Collect))


def _issue(program: Program, transport: Transport, flow: Flow, width: int, dtype: torch.dtype, label: str) -> None:
    """Note the collective that the pieces amount to; the library's notes itself."""
    if program.method is not Method.NONE:
        trace.issue(flow.kind, transport.axis, (flow.split.size, width), dtype, 0, "sum", label)
