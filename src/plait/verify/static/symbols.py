"""Programs run on symbols: which rows are there, which were multiplied, and whose addends are in a sum."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from plait.errors import ScheduleError
from plait.schedule.piece import Piece
from plait.schedule.step import Add, Collect, Content, Message, Method, Multiply, Program, Send, Step, Wait
from plait.schedule.work import Work
from plait.sharding import Interval, Kind

Sum = tuple[int, ...]
"""The ranks whose addends are in a sum, in the order in which they were added."""


class Cells:
    """The rows, cut wherever any step of any rank cuts them: what happens to one row of a cell happens to all."""

    def __init__(self, programs: Sequence[Program], work: Work) -> None:
        cut = [Interval(0, work.num_rows), *(rows for flow in work.flows for rows in flow.split.intervals)]
        for step in (step for program in programs for step in program.steps):
            if isinstance(step, Multiply):
                cut.append(step.rows)
            elif not isinstance(step, Collect) and (piece := _piece_of(step)) is not None:
                cut.append(piece.rows)
        self.edges = sorted({edge for rows in cut for edge in (rows.start, rows.stop)})
        self._index = {edge: index for index, edge in enumerate(self.edges)}

    def __call__(self, rows: Interval) -> range:
        """The cells of `rows`."""
        return range(self._index[rows.start], self._index[rows.stop])

    def show(self, cell: int) -> str:
        """The rows of a cell."""
        return f"{self.edges[cell]}:{self.edges[cell + 1]}"


def _piece_of(step: Step) -> Piece | None:
    match step:
        case Add(piece=piece):
            return piece
        case Send(message) | Wait(message):
            return message.piece
    return None


@dataclass
class Rank:
    """What one rank has, by cell.

    Attributes:
        values: per tensor, the rows that are as they are to be everywhere.
        multiplied: per GEMM, the rows that were.
        addends: the own product, or the sum with those that came.
        received: addends of others, not added yet.
        leaving: rows whose addend was sent, and may be on its way still.
    """

    program: Program
    work: Work
    cells: Cells
    position: int = 0
    values: dict[str, set[int]] = field(default_factory=dict)
    multiplied: dict[str, set[int]] = field(default_factory=dict)
    addends: dict[int, Sum] = field(default_factory=dict)
    received: dict[tuple[int, int], Sum] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.values = {flow.tensor: set() for flow in self.work.flows}
        self.multiplied = {gemm: set() for gemm in self.work.gemms}
        if self.work.gather is not None:
            self.values[self.work.gather.tensor] |= set(self.cells(self.work.gather.split.intervals[self.program.rank]))

    @property
    def step(self) -> Step | None:
        """What comes next, if anything."""
        return self.program.steps[self.position] if self.position < len(self.program.steps) else None

    def refuse(self, why: str) -> NoReturn:
        """The step at hand breaks a rule."""
        refuse(self.program, self.position, why)

    def multiply(self, step: Multiply) -> None:
        """Compute rows that are there, once."""
        if step.gemm not in self.multiplied:
            self.refuse(f"there is no such GEMM, only {', '.join(self.multiplied) or 'none'}")
        done, work = self.multiplied[step.gemm], self.work
        is_summing = step.gemm == work.summing
        if step.accumulates != (is_summing and bool(done)):
            self.refuse("adds to what nothing is in yet" if step.accumulates else "overwrites what is there already")
        reads_gather = work.gather is not None and (is_summing or work.rowwise_reads_gather)
        for cell in self.cells(step.rows):
            if cell in done:
                self.refuse(f"rows {self.cells.show(cell)} were multiplied before")
            if is_summing and work.rowwise and cell not in self.multiplied[work.rowwise]:
                self.refuse(f"rows {self.cells.show(cell)} are not through {work.rowwise} yet, which may fill them in")
            if reads_gather and work.gather and cell not in self.values[work.gather.tensor]:
                self.refuse(f"rows {self.cells.show(cell)} of {work.gather.tensor} have not come yet")
            done.add(cell)
            if not is_summing and work.reduce is not None:
                self.addends[cell] = (self.program.rank,)

    def send(self, message: Message) -> dict[int, Sum]:
        """What sets off: per cell, whose addends; nothing for a value."""
        cells = self.cells(message.piece.rows)
        have = self.values[message.tensor] if message.content is Content.VALUE else self.addends
        for cell in cells:
            if cell not in have:
                self.refuse(f"rows {self.cells.show(cell)} are not there yet")
        if message.content is Content.VALUE:
            return dict.fromkeys(cells, ())
        self.leaving.update(cells)
        return {cell: self.addends[cell] for cell in cells}

    def receive(self, message: Message, sums: dict[int, Sum]) -> None:
        """What has come."""
        for cell, ranks in sums.items():
            if message.content is Content.VALUE:
                self.set_value(message.tensor, cell)
            elif (message.source, cell) in self.received:
                self.refuse(f"addends of rank {message.source} for rows {self.cells.show(cell)} have come before")
            else:
                self.received[message.source, cell] = ranks

    def add(self, step: Add) -> None:
        """Sum addends that are there: the result where this rank owns the rows, else what is sent on."""
        rank, degree = self.program.rank, self.degree_of(step.tensor)
        for cell in self.cells(step.piece.rows):
            ranks: Sum = ()
            for source in step.ranks:
                part = self.addends.get(cell) if source == rank else self.received.pop((source, cell), None)
                if part is None:
                    self.refuse(f"the addend of rank {source} for rows {self.cells.show(cell)} is not there")
                ranks += part
            if len(set(ranks)) < len(ranks):
                self.refuse(f"rows {self.cells.show(cell)} sum the addends of ranks {_show(ranks)}, one of them twice")
            if step.piece.owner != rank:
                if cell in self.leaving:
                    self.refuse(f"rows {self.cells.show(cell)} are changed after they were sent")
                self.addends[cell] = ranks
                continue
            if len(ranks) < degree:
                self.refuse(f"rows {self.cells.show(cell)} sum the addends of ranks {_show(ranks)} only, of {degree}")
            if self.program.method in (Method.DIRECT, Method.BULK) and ranks != tuple(range(degree)):
                self.refuse(
                    f"rows {self.cells.show(cell)} are summed in the order {_show(ranks)}, not in that of ranks"
                )
            self.set_value(step.tensor, cell)

    def set_value(self, tensor: str, cell: int) -> None:
        """Rows are as they are to be, once."""
        if cell in self.values[tensor]:
            self.refuse(f"rows {self.cells.show(cell)} of {tensor} were there before")
        self.values[tensor].add(cell)

    def collect(self, tensor: str) -> None:
        """Take part in the library's collective."""
        flow = self.program.flow(tensor)
        whole = Interval(0, self.work.num_rows)
        if flow.kind is Kind.ALL_GATHER:
            self.values[tensor].update(self.cells(whole))
            return
        for cell in self.cells(whole):
            if cell not in self.addends:
                self.refuse(f"rows {self.cells.show(cell)} are not computed yet")
        for cell in self.cells(self.find_wanted(tensor)):
            self.set_value(tensor, cell)

    def find_wanted(self, tensor: str) -> Interval:
        """The rows that this rank is to have in the end."""
        flow = self.program.flow(tensor)
        is_scattered = flow.kind is Kind.REDUCE_SCATTER
        return flow.split.intervals[self.program.rank] if is_scattered else Interval(0, self.work.num_rows)

    def degree_of(self, tensor: str) -> int:
        """Among how many ranks a tensor moves."""
        return self.program.flow(tensor).split.degree

    def check_complete(self) -> None:
        """Everything was computed, and everything that came was used."""
        for gemm, done in self.multiplied.items():
            for cell in self.cells(Interval(0, self.work.num_rows)):
                if cell not in done:
                    self.refuse(f"rows {self.cells.show(cell)} of {gemm} were never multiplied")
        for tensor, there in self.values.items():
            wanted = set(self.cells(self.find_wanted(tensor)))
            for cell in sorted(wanted ^ there):
                what = "never came" if cell in wanted else "are another rank's"
                self.refuse(f"rows {self.cells.show(cell)} of {tensor} {what}")
        for source, cell in self.received:
            self.refuse(f"the addend of rank {source} for rows {self.cells.show(cell)} came and was never added")


def refuse(program: Program, position: int, why: str) -> NoReturn:
    """A program breaks a rule."""
    at_end = position >= len(program.steps)
    where = "at the end" if at_end else f"step {position} ({program.steps[position]})"
    raise ScheduleError(f"{program.method} schedule of {program.chunks} chunks, rank {program.rank}, {where}: {why}")


def _show(ranks: Sum) -> str:
    return ", ".join(map(str, ranks))
