"""Which tokens of a sequence each rank of a context axis holds, and in which order: intervals of positions.

Contiguous, rank r holds the r-th part of the sequence. Under a causal mask the last rank then has almost twice the work
of the mean. In zigzag the sequence is cut into 2 cp chunks and rank r holds chunks r and 2 cp - 1 - r, one early and
one late, so that all have the same (Llama 3, arXiv:2407.21783, and ring-flash-attention; "headtail" in PyTorch).
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from plait.errors import ShardingError
from plait.sharding.ownership import Interval, Split, build_split


class Order(StrEnum):
    """How tokens are dealt to the ranks."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


@dataclass(frozen=True)
class TokenOrder:
    """The positions that each rank holds, as it stores them: one chunk behind the other.

    Chunks are in rising order on each rank; together they cover `0:size` exactly once. One without tokens is left out.
    """

    size: int
    chunks: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        every = sorted((chunk for own in self.chunks for chunk in own), key=lambda chunk: chunk.start)
        edges = [0, *(chunk.stop for chunk in every)]
        is_rising = all(one.stop <= other.start for own in self.chunks for one, other in pairwise(own))
        if not is_rising or [chunk.start for chunk in every] != edges[:-1] or edges[-1] != self.size:
            listed = "; ".join(", ".join(map(str, own)) or "nothing" for own in self.chunks)
            raise ShardingError(
                f"chunks {listed} do not cover 0:{self.size} exactly once, in rising order on each rank"
            )

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return len(self.chunks)

    @cached_property
    def split(self) -> Split:
        """How many tokens each rank has: intervals of the stored order, in which ranks follow each other."""
        edges = [0, *accumulate(sum(map(len, own)) for own in self.chunks)]
        return Split(self.size, tuple(Interval(start, stop) for start, stop in pairwise(edges)))

    @cached_property
    def stored(self) -> tuple[Interval, ...]:
        """All chunks in the stored order: where position by position comes from."""
        return tuple(chunk for own in self.chunks for chunk in own)

    @cached_property
    def restoring(self) -> tuple[Interval, ...]:
        """Intervals of the stored order which, one behind the other, are the sequence."""
        edges = [0, *accumulate(map(len, self.stored))]
        places = zip(self.stored, pairwise(edges), strict=True)
        return tuple(Interval(*place) for _, place in sorted(places, key=lambda each: each[0].start))

    @property
    def is_restored(self) -> bool:
        """Whether the stored order is that of the sequence already."""
        return all(one.stop == other.start for one, other in pairwise(self.stored))


@lru_cache(maxsize=1024)
def build_order(order: Order, size: int, degree: int) -> TokenOrder:
    """Deal `size` tokens to `degree` ranks; where they do not divide, the first chunks have one more.

    Raises:
        ShardingError: there is no such number of ranks or tokens.
    """
    match order:
        case Order.CONTIGUOUS:
            chunks: list[tuple[Interval, ...]] = [(own,) for own in build_split(size, degree).intervals]
        case Order.ZIGZAG:
            cut = build_split(size, 2 * degree).intervals
            chunks = [(cut[rank], cut[-1 - rank]) for rank in range(degree)]
    return TokenOrder(size, tuple(tuple(chunk for chunk in own if len(chunk)) for own in chunks))
