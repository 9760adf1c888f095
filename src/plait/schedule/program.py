"""Weaving: the pieces that a method moves and the GEMMs beside them become one list of steps."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import itemgetter

from plait.errors import ScheduleError
from plait.schedule import direct, ring
from plait.schedule.movement import Gather, Reduction
from plait.schedule.piece import Pieces, build_pieces
from plait.schedule.step import Collect, Flow, Flush, Method, Multiply, Program, Send, Step
from plait.schedule.work import Work
from plait.sharding import Interval, Kind

_NO_GATHER = Gather((), (), ())

_GATHERS: dict[Method, Callable[[str, Pieces, int, range], Gather]] = {
    Method.BULK: direct.build_gather,
    Method.DIRECT: direct.build_gather,
    Method.RING: ring.build_gather,
    Method.RING_TWO_WAY: partial(ring.build_gather, two_way=True),
}
_REDUCTIONS: dict[Method, Callable[[str, Pieces, int, range], Reduction]] = {
    Method.BULK: direct.build_reduction,
    Method.DIRECT: direct.build_reduction,
    Method.RING: ring.build_reduction,
    Method.RING_TWO_WAY: partial(ring.build_reduction, two_way=True),
}


@lru_cache(maxsize=1024)
def build_program(work: Work, method: Method, chunks: int, rank: int) -> Program:
    """What `rank` does for `work`.

    Own rows are multiplied first where rows are gathered, so that there is something to do until others come, and last
    where they are reduced, so that there is something to do until the last addends have come.

    Raises:
        ScheduleError: a method that cannot do this work.
    """
    if method is Method.NONE:
        steps = _list_serial(work)
    elif work.reduce is not None and work.reduce.kind is Kind.ALL_REDUCE:
        steps = _weave_all_reduce(work, work.reduce, method, chunks, rank)
    elif work.reduce is not None:
        steps = _weave_reduction(work, work.reduce, method, chunks, rank)
    else:
        steps = _weave_gather(work, method, chunks, rank)
    return Program(method, chunks, rank, work.flows, work.gemms, tuple(steps))


def list_methods(work: Work) -> tuple[Method, ...]:
    """The methods that can do `work`."""
    if not work.flows:
        return (Method.NONE,)
    has_independent_gemm = work.summing is not None and work.rowwise is not None and not work.rowwise_reads_gather
    return tuple(method for method in Method if method is not Method.BULK or has_independent_gemm)


def _list_serial(work: Work) -> list[Step]:
    steps: list[Step] = [Collect(work.gather.tensor)] if work.gather else []
    every = Interval(0, work.num_rows)
    steps += [Multiply(work.rowwise, every)] if work.rowwise else []
    steps += [Collect(work.reduce.tensor)] if work.reduce else []
    steps += [Multiply(work.summing, every)] if work.summing else []
    return steps


def _weave_gather(work: Work, method: Method, chunks: int, rank: int) -> list[Step]:
    """Rows are multiplied as they come."""
    if method is Method.BULK:
        raise ScheduleError(
            f"bulk: {' and '.join(work.gemms)} both need what moves, so there is no GEMM to hide it under",
            hint="bulk is for the backward of column linears; use direct or ring",
        )
    if work.gather is None:
        return _list_serial(work)
    gather = _build_gather(work.gather, method, chunks, rank)
    own = work.gather.split.intervals[rank]
    steps: list[Step] = [*gather.recvs, *gather.sends, *_multiply(work.rowwise, own), *_multiply(work.summing, own)]
    for piece, arrive in gather.arrivals:
        steps += [*arrive, *_multiply(work.rowwise, piece.rows)]
    return [*steps, *_multiply_rest(work.summing, own, work.num_rows), Flush(work.gather.tensor)]


def _weave_reduction(work: Work, reduce: Flow, method: Method, chunks: int, rank: int) -> list[Step]:
    """Rows of other owners are computed first and sent off; what is gathered beside is for the GEMM behind."""
    pieces = _build_pieces(reduce, method, chunks)
    gather_rounds, reduce_rounds = _interleave(pieces, method)
    gather = _NO_GATHER
    if work.gather is not None:
        gather = _GATHERS[method](work.gather.tensor, pieces, rank, gather_rounds)
    reduction = _REDUCTIONS[method](reduce.tensor, pieces, rank, reduce_rounds)
    own, every = reduce.split.intervals[rank], Interval(0, work.num_rows)
    steps: list[Step] = [*gather.recvs, *reduction.recvs, *gather.sends]
    is_bulk = method is Method.BULK
    steps += _multiply(work.rowwise, every) if is_bulk else []
    # What others wait for is passed on between the GEMMs, what only this rank waits for is left to the end.
    passing = [(_round_of(arrive), arrive) for _, arrive in gather.arrivals if len(arrive) > 1]
    computing = [
        (_round_of(after), (*([] if is_bulk else _multiply(work.rowwise, piece.rows)), *after))
        for piece, after in reduction.others
    ]
    steps += [step for _, group in sorted([*passing, *computing], key=itemgetter(0)) for step in group]
    steps += [] if is_bulk else _multiply(work.rowwise, own)
    if work.gather is None:
        steps += _multiply(work.summing, every)
    else:
        steps += _multiply(work.summing, own)
        steps += [step for _, arrive in gather.arrivals if len(arrive) == 1 for step in arrive]
        steps += _multiply_rest(work.summing, own, work.num_rows)
    steps += [step for _, finish in reduction.own for step in finish]
    return [*steps, *(Flush(flow.tensor) for flow in work.flows)]


def _interleave(pieces: Pieces, method: Method) -> tuple[range, range]:
    """Numbers for the rounds of a gather and of a reduction, in the order in which all ranks issue them.

    Direct, all of the gather is issued at the start. On a ring a piece is passed on between two addends.
    """
    num = pieces.num_rounds
    if method in (Method.RING, Method.RING_TWO_WAY):
        return range(1, 1 + 2 * num, 2), range(2 * pieces.chunks, 2 * (pieces.chunks + num), 2)
    return range(num), range(num, 2 * num)


def _round_of(steps: Sequence[Step]) -> int:
    return next(step.message.round for step in steps if isinstance(step, Send))


def _weave_all_reduce(work: Work, reduce: Flow, method: Method, chunks: int, rank: int) -> list[Step]:
    """Chunk by chunk: addends of one chunk travel while the next is computed, and its sums while the one after is."""
    pieces = _build_pieces(reduce, method, chunks)
    by_chunk = [pieces.only(index) for index in range(pieces.chunks)]
    width, is_bulk = by_chunk[0].num_rounds, method is Method.BULK
    # Rounds in the order of issue: addends 0, addends 1, sums 0, addends 2, sums 1, ...
    reductions = [
        _REDUCTIONS[method](reduce.tensor, chunk, rank, _number(2 * index, width))
        for index, chunk in enumerate(by_chunk)
    ]
    gathers = [
        _GATHERS[method](reduce.tensor, chunk, rank, _number(2 * index + 3, width))
        for index, chunk in enumerate(by_chunk)
    ]
    sums = [
        [*(step for _, finish in reduction.own for step in finish), *gather.sends]
        for reduction, gather in zip(reductions, gathers, strict=True)
    ]
    values = [[step for _, arrive in gather.arrivals for step in arrive] for gather in gathers]
    steps: list[Step] = [recv for reduction in reductions for recv in reduction.recvs]
    steps += [recv for gather in gathers for recv in gather.recvs]
    steps += _multiply(work.rowwise, Interval(0, work.num_rows)) if is_bulk else []
    for index, reduction in enumerate(reductions):
        for piece, after in reduction.others:
            steps += [*([] if is_bulk else _multiply(work.rowwise, piece.rows)), *after]
        for piece, _ in reduction.own:
            steps += [] if is_bulk else _multiply(work.rowwise, piece.rows)
        steps += sums[index - 1] if index >= 1 else []
        steps += values[index - 2] if index >= 2 else []
    steps += _multiply(work.summing, Interval(0, work.num_rows))
    steps += [*sums[-1], *(step for value in values[-2:] for step in value)]
    return [*steps, Flush(reduce.tensor)]


def _number(stage: int, width: int) -> range:
    return range(stage * width, (stage + 1) * width)


def _build_gather(flow: Flow, method: Method, chunks: int, rank: int) -> Gather:
    pieces = _build_pieces(flow, method, chunks)
    return _GATHERS[method](flow.tensor, pieces, rank, range(pieces.num_rounds))


def _build_pieces(flow: Flow, method: Method, chunks: int) -> Pieces:
    return build_pieces(flow.split, 1 if method is Method.BULK else chunks)


def _multiply(gemm: str | None, rows: Interval, *, accumulates: bool = False) -> list[Step]:
    return [Multiply(gemm, rows, accumulates)] if gemm is not None and len(rows) else []


def _multiply_rest(gemm: str | None, own: Interval, num_rows: int) -> list[Step]:
    """The rows before and behind the own ones, which were multiplied already."""
    before = _multiply(gemm, Interval(0, own.start), accumulates=len(own) > 0)
    behind = _multiply(gemm, Interval(own.stop, num_rows), accumulates=len(own) > 0 or own.start > 0)
    return [*before, *behind]
