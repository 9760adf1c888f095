"""Small programs, step by step. That every program holds is proved in tests/unit/verify/test_schedule.py."""

import pytest
from hypothesis import given

from plait.errors import ScheduleError
from plait.schedule.program import build_program, list_methods
from plait.schedule.step import Method, Multiply
from plait.schedule.work import (
    Work,
    derive_column_backward,
    derive_column_forward,
    derive_row_backward,
    derive_row_forward,
)
from tests.support.strategies import ENTRIES, EXITS, Schedule, build_schedule, schedules

SP_ENTRY, SP_EXIT = ENTRIES[True], EXITS[True]
AR_ENTRY, AR_EXIT = ENTRIES[False], EXITS[False]


def _list(work: Work, method: Method, chunks: int, rank: int) -> str:
    return "\n".join(map(str, build_program(work, method, chunks, rank).steps)) + "\n"


def test_gathered_rows_are_multiplied_as_they_come_the_own_ones_first() -> None:
    """Five rows over three ranks: rank 2 owns one, and has one piece where others have two."""
    assert (
        _list(derive_column_forward(SP_ENTRY, 5, 3), Method.DIRECT, 2, 2)
        == """\
recv value x[0:1] 0 -> 2
recv value x[1:2] 0 -> 2
recv value x[2:3] 1 -> 2
recv value x[3:4] 1 -> 2
send value x[4:5] 2 -> 1
send value x[4:5] 2 -> 0
multiply forward[4:5]
wait value x[0:1] 0 -> 2
multiply forward[0:1]
wait value x[1:2] 0 -> 2
multiply forward[1:2]
wait value x[2:3] 1 -> 2
multiply forward[2:3]
wait value x[3:4] 1 -> 2
multiply forward[3:4]
flush x
"""
    )


def test_round_a_ring_each_rank_passes_on_what_comes_but_the_last() -> None:
    assert (
        _list(derive_column_forward(SP_ENTRY, 3, 3), Method.RING, 1, 0)
        == """\
recv value x[2:3] 2 -> 0
recv value x[1:2] 2 -> 0
send value x[0:1] 0 -> 1
multiply forward[0:1]
wait value x[2:3] 2 -> 0
send value x[2:3] 0 -> 1
multiply forward[2:3]
wait value x[1:2] 2 -> 0
multiply forward[1:2]
flush x
"""
    )


def test_two_ways_every_other_piece_travels_backwards() -> None:
    steps = _list(derive_column_forward(SP_ENTRY, 6, 3), Method.RING_TWO_WAY, 2, 0).splitlines()
    assert [step for step in steps if step.startswith("send")] == [
        "send value x[0:1] 0 -> 1",
        "send value x[1:2] 0 -> 2",
        "send value x[4:5] 0 -> 1",
        "send value x[3:4] 0 -> 2",
    ]


def test_reduced_rows_are_computed_for_others_first_and_summed_in_rank_order() -> None:
    assert (
        _list(derive_row_forward(SP_EXIT, 5, 3), Method.DIRECT, 2, 1)
        == """\
recv addend y[2:3] 2 -> 1
recv addend y[3:4] 2 -> 1
recv addend y[2:3] 0 -> 1
recv addend y[3:4] 0 -> 1
multiply forward[0:1]
send addend y[0:1] 1 -> 0
multiply forward[1:2]
send addend y[1:2] 1 -> 0
multiply forward[4:5]
send addend y[4:5] 1 -> 2
multiply forward[2:4]
wait addend y[2:3] 2 -> 1
wait addend y[2:3] 0 -> 1
add y[2:3] of 0, 1, 2
wait addend y[3:4] 2 -> 1
wait addend y[3:4] 0 -> 1
add y[3:4] of 0, 1, 2
flush y
"""
    )


def test_round_a_ring_a_sum_gathers_an_addend_at_each_rank_and_ends_at_its_owner() -> None:
    assert (
        _list(derive_row_forward(SP_EXIT, 3, 3), Method.RING, 1, 1)
        == """\
recv addend y[2:3] 0 -> 1
recv addend y[1:2] 0 -> 1
multiply forward[0:1]
send addend y[0:1] 1 -> 2
multiply forward[2:3]
wait addend y[2:3] 0 -> 1
add y[2:3] of 0, 1
send addend y[2:3] 1 -> 2
multiply forward[1:2]
wait addend y[1:2] 0 -> 1
add y[1:2] of 0, 1
flush y
"""
    )


def test_backward_of_a_row_linear_multiplies_by_both_gemms_what_comes() -> None:
    """The rows of rank 2 go into wgrad together; those that come last do so one by one."""
    assert (
        _list(derive_row_backward(SP_EXIT, 6, 3), Method.DIRECT, 2, 1)
        == """\
recv value dy[4:5] 2 -> 1
recv value dy[5:6] 2 -> 1
recv value dy[0:1] 0 -> 1
recv value dy[1:2] 0 -> 1
send value dy[2:3] 1 -> 0
send value dy[3:4] 1 -> 0
send value dy[2:3] 1 -> 2
send value dy[3:4] 1 -> 2
multiply dgrad[2:4]
multiply wgrad[2:4]
wait value dy[4:5] 2 -> 1
multiply dgrad[4:5]
wait value dy[5:6] 2 -> 1
multiply dgrad[5:6]
multiply wgrad[4:6] accumulating
wait value dy[0:1] 0 -> 1
multiply dgrad[0:1]
multiply wgrad[0:1] accumulating
wait value dy[1:2] 0 -> 1
multiply dgrad[1:2]
multiply wgrad[1:2] accumulating
flush dy
"""
    )


def test_with_one_chunk_wgrad_of_what_others_own_is_not_cut() -> None:
    assert (
        _list(derive_row_backward(SP_EXIT, 6, 3), Method.DIRECT, 1, 1)
        == """\
recv value dy[4:6] 2 -> 1
recv value dy[0:2] 0 -> 1
send value dy[2:4] 1 -> 0
send value dy[2:4] 1 -> 2
multiply dgrad[2:4]
multiply wgrad[2:4]
wait value dy[4:6] 2 -> 1
multiply dgrad[4:6]
wait value dy[0:2] 0 -> 1
multiply dgrad[0:2]
multiply wgrad[0:2] accumulating
multiply wgrad[4:6] accumulating
flush dy
"""
    )


def test_backward_of_a_column_linear_gathers_again_under_dgrad_and_scatters_under_wgrad() -> None:
    assert (
        _list(derive_column_backward(SP_ENTRY, 4, 2), Method.BULK, 3, 1)
        == """\
recv value x[0:2] 0 -> 1
recv addend dx[2:4] 0 -> 1
send value x[2:4] 1 -> 0
multiply dgrad[0:4]
send addend dx[0:2] 1 -> 0
wait value x[0:2] 0 -> 1
multiply wgrad[0:4]
wait addend dx[2:4] 0 -> 1
add dx[2:4] of 0, 1
flush x
flush dx
"""
    )


def test_round_a_ring_a_gather_begins_behind_the_addends() -> None:
    assert (
        _list(derive_column_backward(SP_ENTRY, 3, 3), Method.RING, 1, 0)
        == """\
recv addend dx[1:2] 2 -> 0
recv addend dx[0:1] 2 -> 0
recv value x[2:3] 2 -> 0
recv value x[1:2] 2 -> 0
multiply dgrad[2:3]
send addend dx[2:3] 0 -> 1
multiply dgrad[1:2]
wait addend dx[1:2] 2 -> 0
add dx[1:2] of 2, 0
send addend dx[1:2] 0 -> 1
send value x[0:1] 0 -> 1
multiply dgrad[0:1]
multiply wgrad[0:1]
wait value x[2:3] 2 -> 0
send value x[2:3] 0 -> 1
multiply wgrad[2:3] accumulating
wait value x[1:2] 2 -> 0
multiply wgrad[1:2] accumulating
wait addend dx[0:1] 2 -> 0
add dx[0:1] of 2, 0
flush x
flush dx
"""
    )


def test_an_all_reduce_sums_one_chunk_while_the_next_is_computed() -> None:
    assert (
        _list(derive_row_forward(AR_EXIT, 8, 2), Method.DIRECT, 3, 0)
        == """\
recv addend y[0:2] 1 -> 0
recv addend y[2:3] 1 -> 0
recv value y[4:6] 1 -> 0
recv addend y[3:4] 1 -> 0
recv value y[6:7] 1 -> 0
recv value y[7:8] 1 -> 0
multiply forward[4:6]
send addend y[4:6] 0 -> 1
multiply forward[0:2]
multiply forward[6:7]
send addend y[6:7] 0 -> 1
multiply forward[2:3]
wait addend y[0:2] 1 -> 0
add y[0:2] of 0, 1
send value y[0:2] 0 -> 1
multiply forward[7:8]
send addend y[7:8] 0 -> 1
multiply forward[3:4]
wait addend y[2:3] 1 -> 0
add y[2:3] of 0, 1
send value y[2:3] 0 -> 1
wait addend y[3:4] 1 -> 0
add y[3:4] of 0, 1
send value y[3:4] 0 -> 1
wait value y[4:6] 1 -> 0
wait value y[6:7] 1 -> 0
wait value y[7:8] 1 -> 0
flush y
"""
    )


def test_an_all_reduce_moves_both_ways_under_the_halves_of_wgrad() -> None:
    assert (
        _list(derive_column_backward(AR_ENTRY, 4, 2), Method.BULK, 1, 0)
        == """\
recv addend dx[0:2] 1 -> 0
recv value dx[2:4] 1 -> 0
multiply dgrad[0:4]
send addend dx[2:4] 0 -> 1
multiply wgrad[0:2]
wait addend dx[0:2] 1 -> 0
add dx[0:2] of 0, 1
send value dx[0:2] 0 -> 1
multiply wgrad[2:4] accumulating
wait value dx[2:4] 1 -> 0
flush dx
"""
    )


def test_a_rank_without_rows_sends_nothing_and_multiplies_what_comes() -> None:
    assert (
        _list(derive_row_backward(SP_EXIT, 1, 2), Method.RING, 4, 1)
        == """\
recv value dy[0:1] 0 -> 1
wait value dy[0:1] 0 -> 1
multiply dgrad[0:1]
multiply wgrad[0:1]
flush dy
"""
    )
    assert (
        _list(derive_row_forward(SP_EXIT, 1, 2), Method.RING, 4, 1)
        == """\
multiply forward[0:1]
send addend y[0:1] 1 -> 0
flush y
"""
    )


def test_serially_the_library_comes_before_what_reads_it_and_after_what_it_sums() -> None:
    assert (
        _list(derive_column_backward(SP_ENTRY, 6, 3), Method.NONE, 1, 0)
        == """\
collect x
multiply dgrad[0:6]
collect dx
multiply wgrad[0:6]
"""
    )
    assert _list(derive_row_forward(AR_EXIT, 6, 3), Method.NONE, 1, 0) == "multiply forward[0:6]\ncollect y\n"


def test_a_gradient_that_is_not_needed_is_neither_computed_nor_moved() -> None:
    only_wgrad = derive_column_backward(SP_ENTRY, 2, 2, needs_dgrad=False)
    assert (
        _list(only_wgrad, Method.RING, 1, 0)
        == """\
recv value x[1:2] 1 -> 0
send value x[0:1] 0 -> 1
multiply wgrad[0:1]
wait value x[1:2] 1 -> 0
multiply wgrad[1:2] accumulating
flush x
"""
    )
    only_dgrad = derive_column_backward(SP_ENTRY, 2, 2, needs_wgrad=False)
    assert _list(only_dgrad, Method.NONE, 1, 0) == "multiply dgrad[0:2]\ncollect dx\n"


MOVING = (Method.NONE, Method.DIRECT, Method.RING, Method.RING_TWO_WAY)


@pytest.mark.parametrize(
    ("work", "methods"),
    [
        (derive_column_forward(SP_ENTRY, 6, 3), MOVING),
        (derive_row_backward(SP_EXIT, 6, 3), MOVING),
        (derive_column_backward(SP_ENTRY, 6, 3), tuple(Method)),
        (derive_column_backward(AR_ENTRY, 6, 3), tuple(Method)),
        (derive_column_backward(SP_ENTRY, 6, 3, needs_wgrad=False), MOVING),
        (derive_column_backward(SP_ENTRY, 6, 3, needs_dgrad=False), MOVING),
        (derive_column_forward(AR_ENTRY, 6, 3), (Method.NONE,)),
        (derive_column_forward(SP_ENTRY, 6, 1), (Method.NONE,)),
        (derive_column_forward(SP_ENTRY, 0, 3), (Method.NONE,)),
    ],
)
def test_bulk_needs_a_gemm_that_does_not_wait_and_everything_needs_rows_that_move(
    work: Work, methods: tuple[Method, ...]
) -> None:
    assert list_methods(work) == methods


def test_a_method_that_cannot_do_a_work_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match="bulk cannot do forward over 6 rows with all_gather of x beside it"
    ) as bulk:
        build_program(derive_column_forward(SP_ENTRY, 6, 3), Method.BULK, 1, 0)
    assert bulk.value.hint == "it can be done by none, direct, ring, ring_two_way"
    with pytest.raises(ScheduleError, match="ring cannot do dgrad and wgrad over 6 rows with nothing beside it"):
        build_program(derive_row_backward(AR_EXIT, 6, 3), Method.RING, 1, 0)


@given(schedule=schedules(max_degree=4, max_rows=12, moves=True))
def test_rows_that_share_a_scale_travel_and_are_multiplied_together(schedule: Schedule) -> None:
    """Of a whole number of units none is cut; where there is no whole number, every row is alone."""
    work = schedule.work
    units = {flow.unit for flow in work.flows}
    assert len(units) == 1
    (unit,) = units
    assert work.num_rows % unit == 0
    for program in schedule.programs:
        rows = [step.rows for step in program.steps if isinstance(step, Multiply)]
        rows += [message.piece.rows for message in program.messages_sent]
        assert all(part.start % unit == part.stop % unit == 0 for part in rows)


def test_an_all_reduce_and_its_halves_are_cut_in_units() -> None:
    """Six rows in threes over two ranks: each sums three, and wgrad takes three before and three behind."""
    work = derive_column_backward(AR_ENTRY, 6, 2, 3)
    steps = _list(work, Method.DIRECT, 4, 0).splitlines()
    assert [step for step in steps if step.startswith(("send", "multiply wgrad"))] == [
        "send addend dx[3:6] 0 -> 1",
        "multiply wgrad[0:3]",
        "send value dx[0:3] 0 -> 1",
        "multiply wgrad[3:6] accumulating",
    ]
    assert derive_column_backward(AR_ENTRY, 7, 2, 3) == derive_column_backward(AR_ENTRY, 7, 2)


@given(schedule=schedules(max_degree=4, max_rows=12, moves=True))
def test_more_chunks_than_units_are_as_many_as_there_are_units(schedule: Schedule) -> None:
    work, degree = schedule.work, len(schedule.programs)
    most = max(1, work.flows[0].split.longest // work.flows[0].unit)
    one, other = (build_schedule(work, degree, schedule.method, chunks).programs for chunks in (most, most + 5))
    assert [program.steps for program in one] == [program.steps for program in other]
