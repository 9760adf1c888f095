"""Ranks as a plain list of integer matrices: what the transition table means, without torch.

`spread` puts one true matrix into a state on every rank, `carry_out` does what a row of the table says, `true_value`
reads the matrix that a state stands for. Integers, so every comparison is exact.
"""

from collections.abc import Sequence
from operator import add

from plait.sharding import Interval, Invariant, Kind, Partial, Placement, Replicate, Shard, Split

Matrix = tuple[tuple[int, ...], ...]
Ranks = list[Matrix]
Splits = tuple[Split, Split]


def spread(value: Matrix, placement: Placement, splits: Splits, addends: Sequence[int]) -> Ranks:
    """The matrix each rank holds when `value` is in `placement`; `addends` make the parts of a Partial differ."""
    degree = splits[0].degree
    match placement:
        case Shard(dim):
            return [take(value, dim, interval) for interval in splits[dim].intervals]
        case Partial():
            parts = [tuple(tuple(addends[rank] for _ in row) for row in value) for rank in range(1, degree)]
            rest = [[element - sum(addends[1:degree]) for element in row] for row in value]
            return [tuple(map(tuple, rest)), *parts]
        case _:
            return [value] * degree


def true_value(ranks: Ranks, placement: Placement, splits: Splits) -> Matrix:
    """The one matrix that `ranks` stand for; fails when they do not agree where they have to."""
    match placement:
        case Shard(dim):
            assert [num_along(part, dim) for part in ranks] == list(splits[dim].lengths), (ranks, splits[dim])
            return join(ranks, dim)
        case Partial():
            return total(ranks)
        case Invariant() | Replicate():
            assert all(part == ranks[0] for part in ranks), ranks
            return ranks[0]


def carry_out(kind: Kind, ranks: Ranks, source: Placement, target: Placement, splits: Splits) -> Ranks:
    """Do what `kind` does on the way from `source` to `target`."""
    match kind:
        case Kind.NOTHING:
            return ranks
        case Kind.TAKE_OWN:
            return spread(ranks[0], target, splits, ())
        case Kind.ALL_REDUCE:
            return [total(ranks)] * len(ranks)
        case Kind.ALL_GATHER:
            assert isinstance(source, Shard), source
            return [join(ranks, source.dim)] * len(ranks)
        case Kind.REDUCE_SCATTER:
            return spread(total(ranks), target, splits, ())
        case Kind.ALL_TO_ALL:
            assert isinstance(source, Shard), source
            return spread(join(ranks, source.dim), target, splits, ())


def take(value: Matrix, dim: int, interval: Interval) -> Matrix:
    """Rows or columns `interval` of `value`."""
    if dim == 0:
        return value[interval.start : interval.stop]
    return tuple(row[interval.start : interval.stop] for row in value)


def join(parts: Ranks, dim: int) -> Matrix:
    """Put parts behind each other along `dim`."""
    if dim == 0:
        return tuple(row for part in parts for row in part)
    return tuple(tuple(element for piece in rows for element in piece) for rows in zip(*parts, strict=True))


def total(parts: Ranks) -> Matrix:
    """Add matrices element by element."""
    result = parts[0]
    for part in parts[1:]:
        result = tuple(tuple(map(add, row, other)) for row, other in zip(result, part, strict=True))
    return result


def num_along(value: Matrix, dim: int) -> int:
    """Number of rows (0) or columns (1)."""
    return len(value) if dim == 0 else len(value[0])
