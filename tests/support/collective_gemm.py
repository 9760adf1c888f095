"""Every pass of a parallel linear on one rank, through `execute`, and what the dense linear gives.

Values are small integers, so sums are exact in any order and dtype, and every comparison is of bits. All ranks draw the
same dense tensors and cut their own part out of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.mesh import Axis
from plait.overlap.execute import Addends, Outcome, execute
from plait.overlap.transport.base import Transport
from plait.schedule.program import build_program, list_methods
from plait.schedule.step import Message, Method, Program
from plait.schedule.work import (
    Work,
    derive_column_backward,
    derive_column_forward,
    derive_row_backward,
    derive_row_forward,
)
from plait.sharding import Interval, Invariant, Partial, Replicate, Shard, build_split, derive_transition

IN, OUT = 6, 5
"""Features of the dense linear for each rank: of its input and output, one of which is cut."""


@dataclass(frozen=True)
class Case:
    """One pass: `column` or `row`, `forward` or `backward`; sequence parallel or with whole activations."""

    linear: str
    direction: str
    is_sequence_parallel: bool
    num_rows: int
    degree: int
    needs_dgrad: bool = True
    needs_wgrad: bool = True

    @property
    def work(self) -> Work:
        tokens = Shard(0) if self.is_sequence_parallel else Invariant()
        if self.linear == "column":
            transition = derive_transition(tokens, Replicate())
        else:
            transition = derive_transition(Partial(), tokens)
        needs = {"needs_dgrad": self.needs_dgrad, "needs_wgrad": self.needs_wgrad}
        match self.linear, self.direction:
            case "column", "forward":
                return derive_column_forward(transition, self.num_rows, self.degree)
            case "row", "forward":
                return derive_row_forward(transition, self.num_rows, self.degree)
            case "column", _:
                return derive_column_backward(transition, self.num_rows, self.degree, **needs)
            case _:
                return derive_row_backward(transition, self.num_rows, self.degree, **needs)


def list_cases(num_rows: int, degree: int) -> list[Case]:
    """Every pass, and backwards of which only one gradient is wanted."""
    cases = [
        Case(linear, direction, is_sequence_parallel, num_rows, degree)
        for linear, direction, is_sequence_parallel in product(
            ("column", "row"), ("forward", "backward"), (True, False)
        )
    ]
    halves = [(True, False), (False, True)]
    return cases + [
        Case(linear, "backward", True, num_rows, degree, *needs) for linear in ("column", "row") for needs in halves
    ]


def list_runs(num_rows: int, degree: int, chunks: tuple[int, ...]) -> Iterator[tuple[Case, Method, int]]:
    """Every case with every method that can do it."""
    for case in list_cases(num_rows, degree):
        for method in list_methods(case.work):
            for number in chunks if method is not Method.NONE else (1,):
                yield case, method, number


@dataclass
class Run:
    """What a rank computed and what it should have; by tensor."""

    program: Program
    outcome: Outcome
    got: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """The tensors that are not the dense ones, bit for bit."""
        assert self.got.keys() == self.expected.keys(), (self.got.keys(), self.expected.keys())
        return [name for name, tensor in self.got.items() if not torch.equal(tensor, self.expected[name])]


def run_case(
    case: Case,
    method: Method,
    chunks: int,
    transport: Transport,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    **extra: Any,
) -> Run:
    """Run one pass on this rank."""
    part = _Part(case, transport.axis, dtype, torch.device(device))
    program = build_program(case.work, method, chunks, transport.axis.rank)
    flows = case.work.flows
    gathered = next((part.shard(flow.tensor) for flow in flows if flow == case.work.gather), None)
    reduced = case.work.reduce and Addends(part.width(case.work.reduce.tensor), dtype, torch.device(device))
    gemms = {"forward": part.forward, "dgrad": part.dgrad, "wgrad": part.wgrad}
    outcome = execute(program, transport, gemms=gemms, shard=gathered, addends=reduced or None, **extra)
    return part.finish(program, outcome)


def run_every(transport: Transport, runs: Iterable[tuple[Case, Method, int]]) -> int:
    """How many runs there were, all of which gave the dense result and sent what was said."""
    number = 0
    for case, method, chunks in runs:
        with trace.record() as recorded:
            run = run_case(case, method, chunks, transport, label="here")
        where = (case, method, chunks)
        assert run.wrong == [], (run.wrong, *where)
        if method is not Method.NONE:
            assert list_moved(recorded, "sent") == run.program.messages_sent, where
            assert list_moved(recorded, "received") == run.program.messages_received, where
        assert [entry.kind for entry in recorded.collectives] == [flow.kind for flow in run.program.flows], where
        number += 1
    return number


def list_moved(recorded: trace.Trace, direction: str) -> list[Message]:
    """The messages that this rank has sent or received, in order."""
    return [entry.message for entry in recorded.moved if entry.direction == direction]


class _Part:
    """One rank's part of the dense linear `y = x @ w.T`, whose gradients are `dx = dy @ w` and `dw = dy.T @ x`."""

    def __init__(self, case: Case, axis: Axis, dtype: torch.dtype, device: torch.device) -> None:
        self.case = case
        self.rank = axis.rank
        generator = torch.Generator().manual_seed(case.num_rows * 10 + case.degree)
        is_column = case.linear == "column"
        num_in, num_out = (IN, OUT * case.degree) if is_column else (IN * case.degree, OUT)

        def draw(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator).to(device, torch.float64)

        x, w, dy = draw(case.num_rows, num_in), draw(num_out, num_in), draw(case.num_rows, num_out)
        self.dense = {"x": x, "y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x, "dy": dy}
        self.dense = {name: tensor.to(dtype) for name, tensor in self.dense.items()}
        width = OUT if is_column else IN
        cut = slice(self.rank * width, (self.rank + 1) * width)
        # What is cut along features, on every rank; what is whole there is cut along tokens, or not at all.
        self.dim_of_features = {"x": None, "dx": None, "y": 1, "dy": 1, "dw": 0} if is_column else {
            "x": 1, "dx": 1, "y": None, "dy": None, "dw": 1,
        }  # fmt: skip
        self.features = cut
        self.w = (w[cut] if is_column else w[:, cut]).to(dtype)
        self.out: dict[str, Tensor] = {}

    def own(self, name: str) -> Tensor:
        """The own features of a tensor, all rows; all features where they are not cut."""
        dim, dense = self.dim_of_features[name], self.dense[name]
        return dense if dim is None else dense[:, self.features] if dim == 1 else dense[self.features]

    def shard(self, name: str) -> Tensor:
        own = build_split(self.case.num_rows, self.case.degree).intervals[self.rank]
        # Neither contiguous nor at the start of its memory.
        return torch.stack([self.dense[name][own.start : own.stop]] * 2, dim=-1)[..., 1]

    def width(self, name: str) -> int:
        return self.dense[name].shape[1]

    def _rowwise(self, name: str, rows: Interval, partial: Tensor | None, product: Tensor) -> None:
        if partial is None:
            partial = self.out.setdefault(name, torch.full_like(self.own(name), torch.nan))
        partial[rows.start : rows.stop] = product

    def forward(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert not accumulates
        x = self.own("x") if full is None else full
        self._rowwise("y", rows, partial, x[rows.start : rows.stop] @ self.w.T)

    def dgrad(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert not accumulates
        dy = self.own("dy") if full is None or self.case.linear == "column" else full
        self._rowwise("dx", rows, partial, dy[rows.start : rows.stop] @ self.w)

    def wgrad(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        is_column = self.case.linear == "column"
        x = full if is_column and full is not None else self.own("x")
        dy = full if not is_column and full is not None else self.own("dy")
        product = dy[rows.start : rows.stop].T @ x[rows.start : rows.stop]
        self.out["dw"] = self.out["dw"] + product if accumulates else product

    def finish(self, program: Program, outcome: Outcome) -> Run:
        run = Run(program, outcome, dict(self.out), {name: self.own(name) for name in self.out})
        if outcome.full is not None:
            name = program.flows[0].tensor
            run.got[name], run.expected[name] = outcome.full.clone(), self.dense[name]
        if outcome.total is not None:
            flow = self.case.work.reduce
            assert flow is not None, program.flows
            run.got[flow.tensor], run.expected[flow.tensor] = outcome.total.clone(), self.dense[flow.tensor]
            if self.case.is_sequence_parallel:
                own = flow.split.intervals[self.rank]
                run.expected[flow.tensor] = self.dense[flow.tensor][own.start : own.stop]
        assert run.got, program
        return run
