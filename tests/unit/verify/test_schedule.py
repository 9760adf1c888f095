"""Every schedule is proved, and every way of breaking one is refused."""

from collections.abc import Callable
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.schedule.step import Add, Collect, Content, Flush, Message, Method, Multiply, Program, Recv, Send, Step, Wait
from plait.schedule.work import derive_column_backward, derive_column_forward, derive_row_forward
from plait.sharding import Interval
from plait.verify.static.schedule import check_schedule, count_buffered_rows
from tests.support.strategies import ENTRIES, EXITS, Schedule, build_schedule, schedules

GATHER = build_schedule(derive_column_forward(ENTRIES[True], 6, 3), 3, Method.RING, 2)
SCATTER = build_schedule(derive_row_forward(EXITS[True], 6, 3), 3, Method.DIRECT, 2)
RING_SCATTER = build_schedule(derive_row_forward(EXITS[True], 6, 3), 3, Method.RING, 2)
BACKWARD = build_schedule(derive_column_backward(ENTRIES[True], 6, 3), 3, Method.RING, 2)
REDUCE = build_schedule(derive_row_forward(EXITS[False], 6, 3), 3, Method.RING, 2)
SERIAL = build_schedule(derive_column_backward(ENTRIES[True], 6, 3), 3, Method.NONE, 1)
ALL = [GATHER, SCATTER, RING_SCATTER, BACKWARD, REDUCE, SERIAL]

Edit = Callable[[list[Step]], list[Step]]


def _mutate(schedule: Schedule, rank: int, edit: Edit) -> tuple[Program, ...]:
    program = schedule.programs[rank]
    steps = tuple(edit(list(program.steps)))
    assert steps != program.steps
    return tuple(replace(program, steps=steps) if each.rank == rank else each for each in schedule.programs)


@given(schedule=schedules())
def test_every_schedule_holds(schedule: Schedule) -> None:
    check_schedule(schedule.programs, schedule.work)


@given(schedule=schedules(moves=True))
def test_nothing_waits_in_a_circle_even_if_a_send_ends_only_when_it_is_received(schedule: Schedule) -> None:
    """Without tags: a rank issues its messages one round after the other, and what it sends and receives in a round
    together; a round ends when both its messages have. Steps of the host come one after the other."""
    graph: TopologicalSorter[object] = TopologicalSorter()
    for program in schedule.programs:
        rank, moves = program.rank, [*program.messages_sent, *program.messages_received]
        rounds = sorted({message.round for message in moves})
        for before, after in pairwise(rounds):
            graph.add(("begin", rank, after), ("end", rank, before))
        for message in moves:
            peer = message.target if message.source == rank else message.source
            graph.add(("end", rank, message.round), ("begin", rank, message.round), ("begin", peer, message.round))
        for index, step in enumerate(program.steps):
            graph.add((rank, index), (rank, index - 1))
            if isinstance(step, Send):
                graph.add(("begin", rank, step.message.round), (rank, index))
            elif isinstance(step, Wait):
                graph.add((rank, index), ("end", rank, step.message.round))
            elif isinstance(step, Flush):
                graph.add((rank, index), *(("end", rank, message.round) for message in program.messages_sent))
    graph.prepare()


@given(schedule=schedules())
def test_room_for_addends_is_bounded_whatever_the_chunks(schedule: Schedule) -> None:
    for program in schedule.programs:
        addends = [flow for flow in schedule.work.flows if flow is schedule.work.reduce]
        bound = sum((flow.split.degree - 1) * flow.split.longest for flow in addends)
        assert count_buffered_rows(program) <= bound


def test_room_for_addends() -> None:
    """Directly, the addends of two others for two own rows; round a ring, those of all pieces but the first's."""
    assert [count_buffered_rows(program) for program in SCATTER.programs] == [4, 4, 4]
    assert [count_buffered_rows(program) for program in RING_SCATTER.programs] == [4, 4, 4]
    assert [count_buffered_rows(program) for program in GATHER.programs] == [0, 0, 0]


@settings(max_examples=150)
@given(schedule=schedules(max_degree=4, max_rows=9), data=st.data())
def test_no_step_can_be_left_out_or_repeated(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([program.rank for program in schedule.programs]))
    steps = schedule.programs[rank].steps
    index = data.draw(st.integers(0, len(steps) - 1))
    times = data.draw(st.sampled_from([0, 2]))
    if schedule.work.num_rows == 0 and isinstance(steps[index], Multiply):
        return
    programs = _mutate(schedule, rank, lambda steps: [*steps[:index], *[steps[index]] * times, *steps[index + 1 :]])
    with pytest.raises(ScheduleError):
        check_schedule(programs, schedule.work)


@given(schedule=schedules(max_degree=4, max_rows=9, moves=True), data=st.data())
def test_two_sends_cannot_change_places(schedule: Schedule, data: st.DataObject) -> None:
    program = data.draw(st.sampled_from([each for each in schedule.programs if len(each.messages_sent) > 1] or [None]))
    if program is None:
        return
    places = [index for index, step in enumerate(program.steps) if isinstance(step, Send)]
    one, other = data.draw(st.lists(st.sampled_from(places), min_size=2, max_size=2, unique=True))

    def swap(steps: list[Step]) -> list[Step]:
        steps[one], steps[other] = steps[other], steps[one]
        return steps

    with pytest.raises(ScheduleError):
        check_schedule(_mutate(schedule, program.rank, swap), schedule.work)


def _at(index: int, **fields: object) -> Edit:
    """Change fields of a step."""
    return lambda steps: [*steps[:index], replace(steps[index], **fields), *steps[index + 1 :]]


def _move(index: int, to: int) -> Edit:
    def move(steps: list[Step]) -> list[Step]:
        steps.insert(to, steps.pop(index))
        return steps

    return move


def _index(schedule: Schedule, text: str) -> int:
    """Where rank 1 has the step that reads `text`."""
    return [str(step) for step in schedule.programs[1].steps].index(text)


REFUSED = [
    (GATHER, "multiply forward[0:1]", {"accumulates": True}, "adds to what nothing is in yet"),
    (GATHER, "multiply forward[0:1]", {"rows": Interval(1, 2)}, "rows 1:2 of x have not come yet"),
    (GATHER, "multiply forward[0:1]", {"rows": Interval(2, 3)}, "rows 2:3 were multiplied before"),
    (GATHER, "multiply forward[0:1]", {"gemm": "dgrad"}, "there is no such GEMM, only forward"),
    (BACKWARD, "multiply wgrad[2:4]", {"accumulates": True}, "adds to what nothing is in yet"),
    (BACKWARD, "multiply wgrad[0:2] accumulating", {"accumulates": False}, "overwrites what is there already"),
    (SCATTER, "add y[2:3] of 0, 1, 2", {"ranks": (0, 1)}, "sum the addends of ranks 0, 1 only, of 3"),
    (SCATTER, "add y[2:3] of 0, 1, 2", {"ranks": (1, 0, 2)}, "summed in the order 1, 0, 2, not in that of ranks"),
    (SCATTER, "add y[2:3] of 0, 1, 2", {"ranks": (0, 1, 1)}, "ranks 0, 1, 1, one of them twice"),
    (RING_SCATTER, "add y[2:3] of 0, 1", {"ranks": (2, 1)}, "the addend of rank 2 for rows 2:3 is not there"),
]


@pytest.mark.parametrize(("schedule", "text", "fields", "why"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_a_changed_step_is_refused_with_its_rank_number_and_rows(
    schedule: Schedule, text: str, fields: dict[str, object], why: str
) -> None:
    index = _index(schedule, text)
    programs = _mutate(schedule, 1, _at(index, **fields))
    where = f"{schedule.method} schedule of 2 chunks, rank 1, step {index} ({programs[1].steps[index]}): "
    with pytest.raises(ScheduleError) as refused:
        check_schedule(programs, schedule.work)
    assert str(refused.value).startswith(where)
    assert why in str(refused.value)


MOVED = [
    (SCATTER, "send addend y[4:5] 1 -> 2", "multiply forward[4:5]", "rows 4:5 are not there yet"),
    (RING_SCATTER, "send addend y[4:5] 1 -> 2", "wait addend y[4:5] 0 -> 1", "are changed after they were sent"),
    (GATHER, "send value x[0:1] 1 -> 2", "wait value x[0:1] 0 -> 1", "rows 0:1 are not there yet"),
    (GATHER, "wait value x[0:1] 0 -> 1", "recv value x[0:1] 0 -> 1", "nothing was posted to receive it"),
    (GATHER, "multiply forward[5:6]", "wait value x[5:6] 0 -> 1", "rows 5:6 of x have not come yet"),
    (GATHER, "flush x", "multiply forward[5:6]", "comes after x was flushed"),
    (SCATTER, "add y[2:3] of 0, 1, 2", "wait addend y[2:3] 0 -> 1", "the addend of rank 0 for rows 2:3 is not there"),
    (BACKWARD, "multiply wgrad[5:6] accumulating", "wait value x[5:6] 0 -> 1", "rows 5:6 of x have not come yet"),
    (BACKWARD, "multiply wgrad[2:4]", "multiply dgrad[2:4]", "rows 2:3 are not through dgrad yet, which may fill"),
    (BACKWARD, "wait value x[4:5] 0 -> 1", "send value x[0:1] 1 -> 2", "round 6 is sent after round 6 was waited for"),
]


@pytest.mark.parametrize(("schedule", "text", "before", "why"), MOVED, ids=[row[1] for row in MOVED])
def test_a_step_that_is_taken_too_early_is_refused(schedule: Schedule, text: str, before: str, why: str) -> None:
    programs = _mutate(schedule, 1, _move(_index(schedule, text), _index(schedule, before)))
    with pytest.raises(ScheduleError, match=why):
        check_schedule(programs, schedule.work)


def test_a_receive_is_posted_before_anything_is_sent() -> None:
    first, sent = _index(GATHER, "recv value x[5:6] 0 -> 1"), _index(GATHER, "send value x[3:4] 1 -> 2")
    with pytest.raises(ScheduleError, match="is posted after a send, behind whose bytes it would wait"):
        check_schedule(_mutate(GATHER, 1, _move(first, sent)), GATHER.work)


LEFT_OUT = [
    (GATHER, "send value x[2:3] 1 -> 2", "rank 2, step 0 .*: nobody sends it"),
    (GATHER, "recv value x[0:1] 0 -> 1", "rank 1, step 6 .*: nothing was posted to receive it"),
    (GATHER, "wait value x[5:6] 0 -> 1", "rank 1, step 3 .*: is never waited for"),
    (GATHER, "multiply forward[4:5]", "rank 1, at the end: rows 4:5 of forward were never multiplied"),
    (GATHER, "flush x", "rank 1, at the end: flushed are \\[\\], where \\['x'\\] move"),
    (SCATTER, "add y[2:3] of 0, 1, 2", "rank 1, at the end: rows 2:3 of y never came"),
    (RING_SCATTER, "add y[4:5] of 0, 1", "rank 2, step .*: rows 4:5 sum the addends of ranks 1, 2 only, of 3"),
    (SERIAL, "collect x", "never ends: rank 0 at step 0 \\(collect x\\)"),
]


@pytest.mark.parametrize(("schedule", "text", "why"), LEFT_OUT, ids=[row[1] for row in LEFT_OUT])
def test_what_is_missing_is_named(schedule: Schedule, text: str, why: str) -> None:
    index = _index(schedule, text)
    with pytest.raises(ScheduleError, match=why):
        check_schedule(_mutate(schedule, 1, lambda steps: [*steps[:index], *steps[index + 1 :]]), schedule.work)


def _send_one_more(schedule: Schedule, target: int) -> tuple[Program, ...]:
    """Rank 0 sends its addend for row 2 to a rank that has no use for it."""
    piece = next(step.piece for step in schedule.programs[1].steps if isinstance(step, Add))
    extra = Message("y", Content.ADDEND, piece, 0, target, 99)
    steps = schedule.programs[target].steps
    last = max(index for index, step in enumerate(steps) if isinstance(step, Recv))
    receiving = (*steps[: last + 1], Recv(extra), *steps[last + 1 : -1], Wait(extra), steps[-1])
    sender, receiver = schedule.programs[0], schedule.programs[target]
    changed = {
        0: replace(sender, steps=(*sender.steps[:-1], Send(extra), sender.steps[-1])),
        target: replace(receiver, steps=receiving),
    }
    return tuple(changed.get(program.rank, program) for program in schedule.programs)


def test_an_addend_that_nobody_adds_is_refused() -> None:
    """Rank 2 owns one row of five, so there would be room for it."""
    schedule = build_schedule(derive_row_forward(EXITS[True], 5, 3), 3, Method.DIRECT, 2)
    with pytest.raises(ScheduleError, match="rank 2, at the end: the addend of rank 0 for rows 2:3 came and was never"):
        check_schedule(_send_one_more(schedule, 2), schedule.work)


def test_more_room_than_the_bound_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 2, at the end: receives up to 5 rows at once, above .* = 4"):
        check_schedule(_send_one_more(SCATTER, 2), SCATTER.work)


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: str(schedule.method))
def test_a_message_to_another_rank_than_planned_is_refused(schedule: Schedule) -> None:
    sends = [index for index, step in enumerate(schedule.programs[0].steps) if isinstance(step, Send)]
    for index in sends:
        message = schedule.programs[0].steps[index].message
        for changed in (
            replace(message, target=0),
            replace(message, target=3 - message.target),
            replace(message, source=2),
        ):
            with pytest.raises(ScheduleError):
                check_schedule(_mutate(schedule, 0, _at(index, message=changed)), schedule.work)


def test_a_sum_by_another_than_the_owner_is_refused() -> None:
    index = _index(SCATTER, "add y[2:3] of 0, 1, 2")
    add = SCATTER.programs[1].steps[index]
    assert isinstance(add, Add)
    programs = _mutate(SCATTER, 1, _at(index, piece=replace(add.piece, owner=0)))
    with pytest.raises(ScheduleError, match="rank 1, at the end: rows 2:3 of y never came"):
        check_schedule(programs, SCATTER.work)


def test_messages_and_the_collective_of_a_library_do_not_mix() -> None:
    with pytest.raises(ScheduleError, match="rank 1, step 0 .collect x.: is no step of method ring"):
        check_schedule(_mutate(GATHER, 1, lambda steps: [Collect("x"), *steps]), GATHER.work)
    with pytest.raises(ScheduleError, match="rank 1, step 4 .flush x.: is no step of method none"):
        check_schedule(_mutate(SERIAL, 1, lambda steps: [*steps, Flush("x")]), SERIAL.work)


def test_ranks_with_programs_of_two_schedules_are_refused() -> None:
    ring, direct = GATHER.programs, build_schedule(GATHER.work, 3, Method.DIRECT, 2).programs
    with pytest.raises(ScheduleError, match="program 1 has another method: direct, where ring is due"):
        check_schedule((ring[0], direct[1], ring[2]), GATHER.work)
    with pytest.raises(ScheduleError, match="program 1 has another rank: 2, where 1 is due"):
        check_schedule((ring[0], ring[2], ring[1]), GATHER.work)
    with pytest.raises(ScheduleError, match="2 programs for a work of 3 ranks"):
        check_schedule(ring[:2], GATHER.work)
    with pytest.raises(ScheduleError, match="program 0 has another flows"):
        check_schedule(ring, replace(GATHER.work, gather=replace(GATHER.work.gather, tensor="dy")))
