"""The first difference between the messages that a rank moved and those of its schedules."""

from dataclasses import replace

import pytest
from hypothesis import given

from plait.schedule.step import Content, Method
from plait.schedule.work import derive_column_forward
from plait.verify.static.trace import find_message_difference, list_promised_messages
from tests.support.strategies import ENTRIES, Schedule, build_schedule, schedules

PROGRAM = build_schedule(derive_column_forward(ENTRIES[True], 4, 2), 2, Method.DIRECT, 2).programs[0]
PROMISED = list_promised_messages([PROGRAM])


@given(schedule=schedules())
def test_a_program_promises_what_it_sends_and_waits_for_and_again_when_it_runs_again(schedule: Schedule) -> None:
    for program in schedule.programs:
        promised = list_promised_messages([program])
        assert [message for how, message in promised if how == "sent"] == program.messages_sent
        assert [message for how, message in promised if how == "received"] == program.messages_received
        assert list_promised_messages([program, program]) == promised * 2


def test_messages_that_moved_as_promised_do_not_differ() -> None:
    assert find_message_difference(PROMISED, list(PROMISED)) is None


@pytest.mark.parametrize("index", range(len(PROMISED)))
def test_every_message_that_is_missing_repeated_or_changed_is_found(index: int) -> None:
    how, message = PROMISED[index]
    changed = (replace(message, content=Content.ADDEND), replace(message, round=7), replace(message, target=2))
    for instead in ([], [(how, message)] * 2, *([(how, other)] for other in changed)):
        assert find_message_difference(PROMISED, [*PROMISED[:index], *instead, *PROMISED[index + 1 :]]) is not None


def test_the_line_says_what_was_promised_and_what_moved() -> None:
    assert find_message_difference(PROMISED, PROMISED[1:]) == (
        "message 0 of 4 promised, 3 moved: sent value x[0:1] 0 -> 1 promised, sent value x[1:2] 0 -> 1"
    )
    assert find_message_difference(PROMISED, PROMISED[:-1]) == (
        "message 3 of 4 promised, 3 moved: received value x[3:4] 1 -> 0 promised, nothing"
    )
