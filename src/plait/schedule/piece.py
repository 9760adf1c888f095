"""Pieces: the token ranges into which each owner's rows are cut."""

from dataclasses import dataclass

from plait.errors import ScheduleError
from plait.sharding import Interval, Split, build_split


@dataclass(frozen=True)
class Piece:
    """The `index`-th piece of the rows of `owner`."""

    owner: int
    index: int
    rows: Interval

    def __str__(self) -> str:
        return str(self.rows)


@dataclass(frozen=True)
class Pieces:
    """All pieces of a split, by index and owner; a piece without rows does not exist.

    Attributes:
        first_index: the index of the first row of the table.
    """

    by_index: tuple[tuple[Piece | None, ...], ...]
    first_index: int = 0

    @property
    def chunks(self) -> int:
        """The most pieces any owner has."""
        return len(self.by_index)

    @property
    def degree(self) -> int:
        """Number of owners."""
        return len(self.by_index[0])

    @property
    def num_rounds(self) -> int:
        """Rounds of messages in which all pieces can be gathered, or their sums brought to the owners."""
        return self.chunks * (self.degree - 1)

    def find(self, owner: int, index: int) -> Piece | None:
        """The piece of `owner`, taken round the ring, in row `index` of the table, if it has so many."""
        return self.by_index[index][owner % self.degree]

    def only(self, index: int) -> "Pieces":
        """One chunk of every owner."""
        return Pieces(self.by_index[index : index + 1], self.first_index + index)


def build_pieces(split: Split, chunks: int, unit: int = 1) -> Pieces:
    """Cut the rows of every owner into `chunks` pieces of whole units, the first ones longer where they do not divide.

    Raises:
        ScheduleError: less than one chunk.
    """
    if chunks < 1:
        raise ScheduleError(f"rows cannot be cut into {chunks} chunks", hint="chunks is at least 1")
    table = [_cut(owner, interval, chunks, unit) for owner, interval in enumerate(split.intervals)]
    most = max((len(pieces) for pieces in table), default=0)
    return Pieces(
        tuple(tuple(pieces[index] if index < len(pieces) else None for pieces in table) for index in range(most))
        or ((None,) * split.degree,)
    )


def _cut(owner: int, rows: Interval, chunks: int, unit: int) -> list[Piece]:
    if not len(rows):
        return []
    cut = build_split(len(rows), min(chunks, len(rows) // unit), unit)
    return [
        Piece(owner, index, Interval(rows.start + part.start, rows.start + part.stop))
        for index, part in enumerate(cut.intervals)
    ]
