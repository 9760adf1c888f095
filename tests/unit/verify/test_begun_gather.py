"""A gather that one schedule begins for the next: both hold, and their messages keep apart."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.schedule.pair import Half, build_pair
from plait.schedule.program import build_program, can_be_begun, can_begin
from plait.schedule.step import Ahead, Flush, Method, Multiply, Send, Wait
from plait.schedule.work import Operation, derive_work
from plait.sharding import Partial, Replicate, Shard, derive_transition
from plait.verify.static.schedule import check_pair

ENTRY, EXIT = derive_transition(Shard(0), Replicate()), derive_transition(Partial(), Shard(0))


def build_programs(num_rows, degree, chunks, method, *, needs_dgrad=True):
    """The backward of a row linear, which begins the gather of the column group in front of it, and that one's."""
    row = derive_work(Operation.ROW_BACKWARD, EXIT, num_rows, degree, needs_dgrad=needs_dgrad)
    column = derive_work(Operation.COLUMN_BACKWARD, ENTRY, num_rows, degree)
    halves = Half(row, Method.DIRECT, chunks[0]), Half(column, method, chunks[1])
    first, second = map(list, zip(*(build_pair(*halves, rank) for rank in range(degree)), strict=True))
    return first, second, (row, column)


@given(
    num_rows=st.integers(1, 40),
    degree=st.integers(2, 8),
    chunks=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    method=st.sampled_from([Method.DIRECT, Method.BULK]),
    needs_dgrad=st.booleans(),
)
def test_both_schedules_hold(num_rows, degree, chunks, method, needs_dgrad):
    first, second, works = build_programs(num_rows, degree, chunks, method, needs_dgrad=needs_dgrad)
    check_pair(first, second, works)
    assert not any(isinstance(step, Send) and step.message.tensor == "x" for each in second for step in each.steps)


def test_what_is_begun_travels_behind_what_the_first_needs_and_is_waited_for_at_the_end_of_the_second():
    (first, _), (second, _), _ = build_programs(4, 2, (1, 1), Method.DIRECT)
    assert [str(step) for step in first.steps if not isinstance(step, Multiply | Flush | Wait)] == [
        "recv value dy[2:4] 1 -> 0",
        "recv value x[2:4] 1 -> 0",
        "send value dy[0:2] 0 -> 1",
        "send value x[0:2] 0 -> 1",
    ]
    assert [str(step) for step in second.steps] == [
        "recv addend dx[0:2] 1 -> 0",
        "multiply dgrad[2:4]",
        "send addend dx[2:4] 0 -> 1",
        "multiply dgrad[0:2]",
        "multiply wgrad[0:2]",
        "wait value x[2:4] 1 -> 0",
        "multiply wgrad[2:4] accumulating",
        "wait addend dx[0:2] 1 -> 0",
        "add dx[0:2] of 0, 1",
        "flush x",
        "flush dx",
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("lost", "nobody sends it"), ("rounds", "would not keep its place"), ("unwaited", "is never waited for")],
)
def test_a_pair_that_does_not_hold_is_refused(fault, message):
    first, second, works = build_programs(12, 3, (2, 2), Method.DIRECT)
    match fault:
        case "lost":
            last = [step for step in first[1].steps if isinstance(step, Send)][-1]
            first[1] = replace(first[1], steps=tuple(step for step in first[1].steps if step != last))
        case "rounds":
            _, second, _ = build_programs(12, 3, (1, 2), Method.DIRECT)
        case "unwaited":
            waits = [step for step in second[0].steps if isinstance(step, Wait) and step.message.tensor == "x"]
            second[0] = replace(second[0], steps=tuple(step for step in second[0].steps if step != waits[0]))
    with pytest.raises(ScheduleError, match=message):
        check_pair(first, second, works)


def test_only_what_is_alone_on_the_link_begins_and_only_what_is_sent_at_the_start_is_begun():
    row = derive_work(Operation.ROW_BACKWARD, EXIT, 8, 2)
    column = derive_work(Operation.COLUMN_BACKWARD, ENTRY, 8, 2)
    assert [method for method in Method if can_begin(row, method)] == [Method.DIRECT]
    assert [method for method in Method if can_be_begun(column, method)] == [Method.BULK, Method.DIRECT]
    assert not can_be_begun(row, Method.DIRECT)
    with pytest.raises(ScheduleError, match="cannot begin a gather for the next program"):
        build_program(row, Method.RING, 1, 0, ahead=Ahead(column.gather, 1))
