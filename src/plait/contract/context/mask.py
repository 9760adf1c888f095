"""Which token sees which: causal or not, within a window, within its own document. No matrix, only intervals."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from plait.errors import ShardingError
from plait.sharding import Interval


@dataclass(frozen=True)
class AttentionMask:
    """Position i sees position j of its own document if `low <= i - j <= high`.

    Attributes:
        causal: whether a token sees none behind it.
        window: a token sees those less than so far away; itself only, with 1.
        documents: the documents of each row of the batch, of all rows if there is one entry. What is in none of them is
            padding: it sees nothing and nobody sees it. Without any, each row is one document.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[tuple[Interval, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ShardingError(
                f"a window of {self.window} tokens would hide each token from itself", hint="window is at least 1"
            )
        for row, documents in enumerate(self.documents):
            for one, other in pairwise(documents):
                if one.stop > other.start:
                    raise ShardingError(
                        f"row {row}: documents {one} and {other} are not one behind the other: "
                        "a token would be in both, or the order would be lost"
                    )

    @property
    def low(self) -> int | None:
        """The least `i - j`; None for any."""
        return 0 if self.causal else None if self.window is None else 1 - self.window

    @property
    def high(self) -> int | None:
        """The greatest `i - j`; None for any."""
        return None if self.window is None else self.window - 1

    def check_fits(self, batch: int, size: int) -> None:
        """Refuse documents of another batch or of longer rows.

        Raises:
            ShardingError: they do not fit, in which row.
        """
        if len(self.documents) not in (0, 1, batch):
            raise ShardingError(
                f"a mask has documents for {len(self.documents)} rows, but the batch has {batch}",
                hint="give them for each row, or once for all",
            )
        for row, documents in enumerate(self.documents):
            if documents and documents[-1].stop > size:
                raise ShardingError(f"row {row}: document {documents[-1]} goes beyond the {size} tokens of a sequence")

    def group_rows(self, batch: int) -> list[tuple[Interval, int]]:
        """Rows of the batch that have the same documents, and one of them."""
        if len(self.documents) < 2:
            return [(Interval(0, batch), 0)]
        starts = [row for row in range(batch) if row == 0 or self.documents[row] != self.documents[row - 1]]
        return [(Interval(start, stop), start) for start, stop in pairwise([*starts, batch])]

    def pair_documents(self, row: int, q: Interval, k: Interval) -> list[tuple[Interval, Interval]]:
        """The parts of `q` and of `k` that are in one document, for each document that both have a part of."""
        if not self.documents:
            return [(q, k)] if len(q) and len(k) else []
        own = self.documents[row if len(self.documents) > 1 else 0]
        # Of a thousand documents hardly one is in both: looking at all, for each pair of chunks, would take seconds.
        first = max(bisect_right(own, part.start, key=lambda document: document.stop) for part in (q, k))
        stop = min(bisect_left(own, part.stop, key=lambda document: document.start) for part in (q, k))
        pairs = ((q.intersect(document), k.intersect(document)) for document in own[first:stop])
        return [pair for pair in pairs if all(map(len, pair))]

    def count_visible(self, row: int, q: Interval, k: Interval) -> int:
        """How many pairs of a query position of `q` and a key position of `k` of one row see each other."""
        total = 0
        for own_q, own_k in self.pair_documents(row, q, k):
            shift = own_q.start - own_k.start
            low, high = (None if bound is None else bound - shift for bound in (self.low, self.high))
            total += count_band(len(own_q), len(own_k), low, high)
        return total


CAUSAL = AttentionMask()
"""A token sees itself and those before it in its sequence."""


def count_band(num_q: int, num_k: int, low: int | None, high: int | None) -> int:
    """How many `0 <= u < num_q`, `0 <= w < num_k` have `low <= u - w <= high`."""
    upper = num_q * num_k if high is None else _count_up_to(num_q, num_k, high)
    return upper - (0 if low is None else _count_up_to(num_q, num_k, low - 1))


def _count_up_to(num_q: int, num_k: int, limit: int) -> int:
    """How many have `u - w <= limit`: all w for a u up to `limit`, and one less for each u beyond."""
    whole = num_k * min(max(limit + 1, 0), num_q)
    first, last = max(1, -limit), min(num_k - 1, num_q - 1 - limit)
    beyond = max(0, last - first + 1)
    return whole + beyond * num_k - beyond * (first + last) // 2


def build_documents(lengths: Iterable[Sequence[int]]) -> tuple[tuple[Interval, ...], ...]:
    """The documents of each row by their lengths, from the start of the row; what is left of it is padding.

    Raises:
        ShardingError: a length is negative.
    """
    rows = []
    for row, own in enumerate(lengths):
        if any(length < 0 for length in own):
            raise ShardingError(f"row {row}: documents of lengths {list(own)}: a length is negative")
        edges = pairwise([0, *accumulate(own)])
        rows.append(tuple(Interval(start, stop) for start, stop in edges if stop > start))
    return tuple(rows)
