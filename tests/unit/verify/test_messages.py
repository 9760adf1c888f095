"""The first difference between what a rank moved and its schedule."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedule.step import Content, Method
from plait.schedule.work import derive_column_forward
from plait.verify.static.messages import find_message_difference
from tests.support.strategies import ENTRIES, Schedule, build_schedule, schedules

PROGRAM = build_schedule(derive_column_forward(ENTRIES[True], 4, 2), 2, Method.DIRECT, 2).programs[0]
MOVED = [*PROGRAM.messages_received, *PROGRAM.messages_sent]


@given(schedule=schedules(), data=st.data())
def test_what_was_promised_differs_in_nothing_however_the_directions_are_mingled(
    schedule: Schedule, data: st.DataObject
) -> None:
    program = data.draw(st.sampled_from(schedule.programs))
    sent, received = list(program.messages_sent), list(program.messages_received)
    moved = []
    while sent or received:
        moved.append((sent if not received or (sent and data.draw(st.booleans())) else received).pop(0))
    assert find_message_difference(program, moved) is None


@pytest.mark.parametrize("index", range(len(MOVED)))
def test_every_message_that_is_missing_repeated_or_changed_is_found(index: int) -> None:
    message = MOVED[index]
    for instead in ([], [message] * 2, [replace(message, content=Content.ADDEND)], [replace(message, round=7)]):
        difference = find_message_difference(PROGRAM, [*MOVED[:index], *instead, *MOVED[index + 1 :]])
        assert difference is not None
        assert difference.direction == ("sent" if message.source == 0 else "received")


def test_messages_in_another_order_are_found() -> None:
    difference = find_message_difference(PROGRAM, MOVED[::-1])
    assert str(difference) == (
        "rank 0 sent value x[1:2] 0 -> 1 in round 1 as message 0, where its schedule has value x[0:1] 0 -> 1 in round 0"
    )


def test_a_message_too_much_and_one_too_few_are_told_apart() -> None:
    assert str(find_message_difference(PROGRAM, MOVED[1:2] + MOVED[2:])).startswith("rank 0 received value x[3:4]")
    assert str(find_message_difference(PROGRAM, MOVED[:-1])) == (
        "rank 0 sent nothing as message 1, where its schedule has value x[1:2] 0 -> 1 in round 1"
    )
    assert str(find_message_difference(PROGRAM, [*MOVED, MOVED[-1]])) == (
        "rank 0 sent value x[1:2] 0 -> 1 in round 1 as message 2, where its schedule has nothing"
    )
