"""The one interpreter of schedules: takes the steps of a program in order, over whatever transport."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from plait.comm import trace
from plait.overlap.transport.base import GatherSession, ReduceSession, Transport
from plait.schedule.step import Add, Collect, Flow, Flush, Method, Multiply, Program, Recv, Send, Step, Wait
from plait.sharding import Interval, Kind


class Rows(Protocol):
    """A GEMM that is computed some rows at a time."""

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        """Compute `rows`: from the gathered `full` where it reads that, into `partial` where others sum it."""


@dataclass(frozen=True)
class Addends:
    """The rows that are to be reduced: `[T, width]`."""

    width: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class Outcome:
    """What a run gives.

    Attributes:
        full: the gathered tensor; the transport's where that keeps its memory.
        total: what the reduction gives.
        exposed_s: how long the host waited for others.
    """

    full: Tensor | None = None
    total: Tensor | None = None
    exposed_s: float = 0.0


class Observer(Protocol):
    """Told of every step that was taken, for a timeline."""

    def note(self, step: Step, start_s: float, end_s: float) -> None: ...


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
    gather: GatherSession | None = None
    reduce: ReduceSession | None = None
    sessions: dict[str, GatherSession | ReduceSession] = {}
    for flow in program.flows:
        if flow.kind is Kind.ALL_GATHER:
            assert shard is not None, (label, flow)
            _issue(program, transport, flow, shard.shape[1], shard.dtype, label)
            sessions[flow.tensor] = gather = transport.open_gather(flow, shard, label)
        else:
            assert addends is not None, (label, flow)
            _issue(program, transport, flow, addends.width, transport.axis.reduce_dtype or addends.dtype, label)
            sessions[flow.tensor] = reduce = transport.open_reduce(
                flow, addends.width, addends.dtype, addends.device, label
            )
    outcome = Outcome()
    full, partial = gather.full if gather else None, reduce.partial if reduce else None
    for step in program.steps:
        start_s = perf_counter()
        match step:
            case Multiply(gemm, rows, accumulates):
                gemms[gemm](rows, full, partial, accumulates=accumulates)
            case Recv(message):
                sessions[message.tensor].recv(message)
            case Send(message):
                sessions[message.tensor].send(message)
            case Wait(message):
                sessions[message.tensor].wait(message)
            case Add(_, piece, ranks):
                assert reduce is not None, (label, step)
                reduce.add(piece, ranks)
            case Flush(tensor):
                sessions[tensor].flush()
            case Collect(tensor):
                sessions[tensor].collect()
                # A library may give a tensor of its own.
                full = gather.full if gather else None
        end_s = perf_counter()
        if isinstance(step, Wait | Flush | Collect):
            outcome.exposed_s += end_s - start_s
        if observer is not None:
            observer.note(step, start_s, end_s)
    outcome.full = full
    outcome.total = reduce.total if reduce else None
    return outcome


def _issue(program: Program, transport: Transport, flow: Flow, width: int, dtype: torch.dtype, label: str) -> None:
    """Note the collective that the pieces amount to; the library's notes itself."""
    if program.method is not Method.NONE:
        trace.issue(flow.kind, transport.axis, (flow.split.size, width), dtype, 0, "sum", label)
