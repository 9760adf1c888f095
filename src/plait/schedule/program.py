"""Weaving: the pieces that a method moves and the GEMMs beside them become one list of steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from plait.errors import ScheduleError
from plait.schedule import direct, ring
from plait.schedule.movement import Arrival, Gather, Reduction
from plait.schedule.piece import Pieces, build_pieces
from plait.schedule.step import Ahead, Collect, Flow, Flush, Method, Multiply, Program, Recv, Send, Step
from plait.schedule.work import Work
from plait.sharding import Interval, Kind, build_split

_NO_GATHER = Gather((), (), ())
_RINGS = (Method.RING, Method.RING_TWO_WAY)

_Group = tuple[int, Sequence[Step]]
"""Steps that stay together, and the round that says where among other groups."""

_GATHERS: dict[Method, Callable[[str, Pieces, int, Sequence[int]], Gather]] = {
    Method.BULK: direct.build_gather,
    Method.DIRECT: direct.build_gather,
    Method.RING: ring.build_gather,
    Method.RING_TWO_WAY: partial(ring.build_gather, two_way=True),
}
_REDUCTIONS: dict[Method, Callable[[str, Pieces, int, Sequence[int]], Reduction]] = {
    Method.BULK: direct.build_reduction,
    Method.DIRECT: direct.build_reduction,
    Method.RING: ring.build_reduction,
    Method.RING_TWO_WAY: partial(ring.build_reduction, two_way=True),
}


@lru_cache(maxsize=1024)
def build_program(
    work: Work, method: Method, chunks: int, rank: int, *, ahead: Ahead | None = None, first_round: int | None = None
) -> Program:
    """What `rank` does for `work`.

    `ahead` is to be begun for the next program, which is then built with `first_round`, that of what was begun.

    Own rows are multiplied first where rows are gathered, so that there is something to do until others come, and last
    where they are reduced, so that there is something to do until the last addends have come.

    Raises:
        ScheduleError: a method that cannot do this work.
    """
    if method not in (able := list_methods(work)):
        moved = " and ".join(f"{flow.kind} of {flow.tensor}" for flow in work.flows if work.num_rows) or "nothing"
        raise ScheduleError(
            f"{method} cannot do {' and '.join(work.gemms)} over {work.num_rows} rows with {moved} beside it",
            hint=f"it can be done by {', '.join(able)}",
        )
    if (ahead and not can_begin(work, method)) or (first_round is not None and not can_be_begun(work, method)):
        raise ScheduleError(
            f"{method} of {' and '.join(work.gemms)} cannot begin a gather for the next program, or have its own begun",
            hint="a direct gather can begin another, and the backward of a column linear can have its own begun",
        )
    if method is Method.NONE:
        steps = _list_serial(work)
    elif work.reduce is not None and work.reduce.kind is Kind.ALL_REDUCE:
        steps = _weave_all_reduce(work, work.reduce, method, chunks, rank)
    elif work.reduce is not None:
        steps = _weave_reduction(work, work.reduce, method, chunks, rank, first_round)
    else:
        assert work.gather is not None
        steps = _weave_gather(work, work.gather, method, chunks, rank, ahead)
    steps = [*_accumulate(steps, work.summing)]
    return Program(method, chunks, rank, work.flows, work.gemms, tuple(steps), ahead, first_round is not None)


def can_begin(work: Work, method: Method) -> bool:
    """Whether a program can begin a gather for the next: nothing but its own gather moves, and that at the start."""
    return method is Method.DIRECT and work.gather is not None and work.reduce is None


def can_be_begun(work: Work, method: Method) -> bool:
    """Whether the program before can have begun the gather: it is all sent at the start, and waited for at the end."""
    is_sent_at_start = method in (Method.DIRECT, Method.BULK)
    return is_sent_at_start and work.gather is not None and work.reduce is not None and not work.rowwise_reads_gather


def list_methods(work: Work) -> tuple[Method, ...]:
    """The methods that can do `work`."""
    if not work.flows or not work.num_rows:
        return (Method.NONE,)
    has_independent_gemm = work.summing is not None and work.rowwise is not None and not work.rowwise_reads_gather
    return tuple(method for method in Method if method is not Method.BULK or has_independent_gemm)


def _list_serial(work: Work) -> list[Step]:
    every = Interval(0, work.num_rows)
    steps: list[Step] = [Collect(work.gather.tensor)] if work.gather else []
    steps += [Multiply(work.rowwise, every)] if work.rowwise else []
    steps += [Collect(work.reduce.tensor)] if work.reduce else []
    steps += [Multiply(work.summing, every)] if work.summing else []
    return steps


def _weave_gather(work: Work, flow: Flow, method: Method, chunks: int, rank: int, ahead: Ahead | None) -> list[Step]:
    """Rows are multiplied as they come; what is begun for the next program travels behind them."""
    pieces = build_pieces(flow.split, chunks, flow.unit)
    gather = _GATHERS[method](flow.tensor, pieces, rank, range(pieces.num_rounds))
    begun = _NO_GATHER
    if ahead is not None:
        later = build_pieces(ahead.flow.split, ahead.chunks, ahead.flow.unit)
        rounds = range(pieces.num_rounds, pieces.num_rounds + later.num_rounds)
        begun = direct.build_gather(ahead.flow.tensor, later, rank, rounds)
    own = flow.split.intervals[rank]
    steps = [*_post([*gather.recvs, *begun.recvs]), *gather.sends, *begun.sends]
    steps += [*_multiply(work.rowwise, own), *_multiply(work.summing, own)]
    for arrivals, ready in _join(gather, work.num_rows, own, is_fine=pieces.chunks > 1 or method in _RINGS):
        for piece, arrive in arrivals:
            steps += [*arrive, *_multiply(work.rowwise, piece.rows)]
        steps += _multiply(work.summing, *ready)
    return [*steps, Flush(flow.tensor)]


def _weave_reduction(
    work: Work, reduce: Flow, method: Method, chunks: int, rank: int, first_round: int | None
) -> list[Step]:
    """Rows of other owners are computed first and sent off; what is gathered beside is for the GEMM behind.

    Directly, all of a gather is sent at the start, to be there in time. Round a ring it begins behind the addends: it
    has to be passed on again and again, which the first GEMM would have to wait for as well.
    """
    is_bulk, is_ring = method is Method.BULK, method in _RINGS
    pieces = build_pieces(reduce.split, 1 if is_bulk else chunks, reduce.unit)
    start, num_rounds = first_round or 0, pieces.num_rounds
    earlier, later = range(start, start + num_rounds), range(start + num_rounds, start + 2 * num_rounds)
    gather = _NO_GATHER
    if work.gather is not None:
        gather = _GATHERS[method](work.gather.tensor, pieces, rank, later if is_ring else earlier)
    reduction = _REDUCTIONS[method](reduce.tensor, pieces, rank, earlier if is_ring else later)
    own, every = reduce.split.intervals[rank], _every(work)
    if first_round is not None:
        gather = Gather((), (), gather.arrivals)
    steps = [*_post([*gather.recvs, *reduction.recvs]), *(() if is_ring else gather.sends)]
    steps += _multiply(work.rowwise, every) if is_bulk else []
    for piece, after in reduction.others:
        steps += [*([] if is_bulk else _multiply(work.rowwise, piece.rows)), *after]
    steps += gather.sends if is_ring else ()
    steps += [] if is_bulk else _multiply(work.rowwise, own)
    first = Interval(0, 0) if is_bulk else own
    steps += _multiply(work.summing, first)
    for arrivals, ready in _join(gather, work.num_rows, first, is_fine=pieces.chunks > 1 or is_ring):
        steps += [*(step for _, arrive in arrivals for step in arrive), *_multiply(work.summing, *ready)]
    steps += [step for _, finish in reduction.own for step in finish]
    return [*steps, *(Flush(flow.tensor) for flow in work.flows)]


def _join(
    gather: Gather, num_rows: int, done: Interval, *, is_fine: bool
) -> list[tuple[list[Arrival], list[Interval]]]:
    """What comes, and the rows for a GEMM that sums over them which are there then, apart from those that are `done`.

    Such a GEMM reads and writes all of its result every time, so it is not cut as fine as what moves: it gets the rows
    of an owner together, or all at the end. But what comes last it gets piece by piece, with nothing else to do then.
    """
    if not is_fine:
        return [(list(gather.arrivals), [Interval(0, done.start), Interval(done.stop, num_rows)])]
    joined: list[tuple[list[Arrival], list[Interval]]] = []
    for arrival in gather.arrivals:
        piece, last = arrival[0], gather.arrivals[-1][0]
        before = joined[-1][0][-1][0] if joined else None
        if before and before.owner == piece.owner != last.owner and before.rows.stop == piece.rows.start:
            arrivals, (rows,) = joined[-1]
            joined[-1] = [*arrivals, arrival], [Interval(rows.start, piece.rows.stop)]
        else:
            joined.append(([arrival], [piece.rows]))
    return joined


def _weave_all_reduce(work: Work, reduce: Flow, method: Method, chunks: int, rank: int) -> list[Step]:
    """Chunk by chunk: addends of one chunk travel while the next is computed, and its sums while the one after is."""
    is_bulk = method is Method.BULK
    pieces = build_pieces(reduce.split, 1 if is_bulk else chunks, reduce.unit)
    recvs: list[Recv] = []
    # The addends of the last chunk travel under one half of a GEMM that needs none of them, its sums under the other.
    halves = build_split(work.num_rows, 2, reduce.unit).intervals
    groups: list[_Group] = [
        (_Stage(pieces.chunks + half, pieces.degree).start, _multiply(work.summing, rows))
        for half, rows in enumerate(halves)
    ]
    last: list[Step] = []
    for index in range(pieces.chunks):
        stage, chunk = _Stage(index, pieces.degree), pieces.only(index)
        reduction = _REDUCTIONS[method](reduce.tensor, chunk, rank, stage.addends)
        gather = _GATHERS[method](reduce.tensor, chunk, rank, stage.list_sums(method))
        recvs += [*reduction.recvs, *gather.recvs]
        for piece, after in reduction.others:
            groups.append((_round_of(after), (*_multiply(None if is_bulk else work.rowwise, piece.rows), *after)))
        for piece, finish in reduction.own:
            groups.append((stage.own, _multiply(None if is_bulk else work.rowwise, piece.rows)))
            groups.append((_round_of(gather.sends), (*finish, *gather.sends)))
        groups += [(_round_of(arrive), arrive) for _, arrive in gather.arrivals if len(arrive) > 1]
        last += [step for _, arrive in gather.arrivals if len(arrive) == 1 for step in arrive]
    whole = _multiply(work.rowwise if is_bulk else None, _every(work))
    return [*_post(recvs), *whole, *_sort(groups), *last, Flush(reduce.tensor)]


@dataclass(frozen=True)
class _Stage:
    """The rounds in which one chunk of an all-reduce moves, in the order in which all ranks issue them.

    While a chunk is computed its addends are sent off, and between them the sums of the chunk two before are passed on
    round a ring. When it is computed, the addends of the chunk before have come: their sums are finished and sent off.
    """

    index: int
    degree: int

    @property
    def start(self) -> int:
        """Before anything else of this stage."""
        return self.index * 3 * self.degree

    @property
    def addends(self) -> range:
        """Every other round, so that there is room between them."""
        return range(self.start + 1, self.own, 2)

    @property
    def own(self) -> int:
        """When the own rows are computed."""
        return self.start + 2 * self.degree - 1

    def list_sums(self, method: Method) -> list[int]:
        """The rounds of the sums: a stage later all that this rank sends of its own, two later what it passes on."""
        own, passed = _Stage(self.index + 1, self.degree).own, _Stage(self.index + 2, self.degree).start
        if method in _RINGS:
            return [own + 1, *range(passed + 2, passed + 2 * self.degree - 2, 2)]
        return list(range(own + 1, own + self.degree))


def _post(recvs: Sequence[Recv]) -> list[Step]:
    """All receives, in the order in which what they wait for is sent."""
    return [*sorted(recvs, key=lambda recv: recv.message.round)]


def _sort(groups: Sequence[_Group]) -> Iterator[Step]:
    for _, steps in sorted(groups, key=lambda group: group[0]):
        yield from steps


def _round_of(steps: Sequence[Step]) -> int:
    return next(step.message.round for step in steps if isinstance(step, Send))


def _every(work: Work) -> Interval:
    return Interval(0, work.num_rows)


def _multiply(gemm: str | None, *parts: Interval) -> list[Step]:
    return [Multiply(gemm, rows) for rows in parts if gemm is not None and len(rows)]


def _accumulate(steps: Iterable[Step], summing: str | None) -> Iterator[Step]:
    """A GEMM that sums over rows adds to what is there, but for the first time."""
    is_first = True
    for step in steps:
        if isinstance(step, Multiply) and step.gemm == summing:
            yield replace(step, accumulates=not is_first)
            is_first = False
        else:
            yield step
