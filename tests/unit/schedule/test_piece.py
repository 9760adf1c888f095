"""Pieces cover the rows of their owner once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.schedule.piece import Pieces, build_pieces
from plait.sharding import build_split


def _list(pieces: Pieces, owner: int) -> list[str]:
    return [str(piece) for index in range(pieces.chunks) if (piece := pieces.find(owner, index)) is not None]


@given(num_units=st.integers(0, 40), unit=st.integers(1, 32), degree=st.integers(1, 9), chunks=st.integers(1, 6))
def test_pieces_cover_the_rows_of_every_owner_once_and_in_order(
    num_units: int, unit: int, degree: int, chunks: int
) -> None:
    split = build_split(num_units * unit, degree, unit)
    pieces = build_pieces(split, chunks, unit)
    for owner, rows in enumerate(split.intervals):
        found = [piece for index in range(pieces.chunks) if (piece := pieces.find(owner, index)) is not None]
        assert [row for piece in found for row in range(piece.rows.start, piece.rows.stop)] == list(
            range(rows.start, rows.stop)
        )
        assert [(piece.owner, piece.index) for piece in found] == [(owner, index) for index in range(len(found))]
        assert len(found) == min(chunks, len(rows) // unit)
        assert all(piece.rows.start % unit == piece.rows.stop % unit == 0 for piece in found)
        assert max(map(len, (piece.rows for piece in found)), default=0) <= -(-len(rows) // unit // chunks) * unit


def test_first_pieces_are_a_row_longer_where_rows_do_not_divide() -> None:
    pieces = build_pieces(build_split(7, 2), 3)
    assert [_list(pieces, owner) for owner in range(2)] == [["0:2", "2:3", "3:4"], ["4:5", "5:6", "6:7"]]


def test_an_owner_of_fewer_rows_than_chunks_has_fewer_pieces() -> None:
    pieces = build_pieces(build_split(4, 3), 2)
    assert [_list(pieces, owner) for owner in range(3)] == [["0:1", "1:2"], ["2:3"], ["3:4"]]
    assert pieces.chunks == 2
    assert build_pieces(build_split(4, 3), 9).chunks == 2


def test_no_rows_are_one_chunk_of_nothing() -> None:
    pieces = build_pieces(build_split(0, 3), 4)
    assert (pieces.chunks, pieces.num_rounds) == (1, 2)
    assert [_list(pieces, owner) for owner in range(3)] == [[], [], []]


def test_owners_are_counted_round_the_ring() -> None:
    pieces = build_pieces(build_split(6, 3), 1)
    assert pieces.find(4, 0) == pieces.find(1, 0)
    assert pieces.find(-1, 0) == pieces.find(2, 0)


def test_one_chunk_of_every_owner_keeps_its_index() -> None:
    pieces = build_pieces(build_split(8, 2), 2).only(1)
    assert (pieces.chunks, pieces.first_index) == (1, 1)
    assert [_list(pieces, owner) for owner in range(2)] == [["2:4"], ["6:8"]]


def test_less_than_one_chunk_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rows cannot be cut into 0 chunks\n\nhint: chunks is at least 1"):
        build_pieces(build_split(8, 2), 0)
