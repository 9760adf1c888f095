"""The notice board, over a store in memory."""

from typing import Any

import pytest
import torch.distributed as dist

from plait.comm.board import Board
from plait.comm.environment import Launch

SIZE = 64


@pytest.fixture
def boards() -> list[Board]:
    """Of all ranks of one world."""
    store = dist.HashStore()
    return [Board(store, Launch("torchrun", world_size=SIZE, rank=rank), limit_s=5.0) for rank in range(SIZE)]


def _count_questions(board: Board, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []
    ask = board._ask
    monkeypatch.setattr(board, "_ask", lambda act: (asked.append(act), ask(act))[1])
    return asked


def test_ranks_that_wait_for_each_other_ask_one_question_each_time(boards, monkeypatch) -> None:
    """Of a thousand ranks that wait, each asking for each other, the store would have a million to answer."""
    for board in boards[:-1]:
        board._set("arrived")
    asked = _count_questions(boards[1], monkeypatch)
    assert not boards[1]._have_all_arrived()
    assert len(asked) == 1
    boards[-1]._set("arrived")
    assert boards[1]._have_all_arrived()
    assert len(asked) == 2


def test_those_that_are_missing_are_named(boards) -> None:
    for rank in (0, 2, *range(4, SIZE)):
        boards[rank]._set("returned")
    assert boards[0]._missing("returned") == [1, 3]
