"""The ring's programs are proved for every table of needs, and the proof sees what is wrong with one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.contract.context.attention import ContextPlan
from plait.contract.context.needs import Needs
from plait.errors import ScheduleError
from plait.schedule.context import Attend, RingProgram, RingStep, Sum, build_ring_backward, build_ring_forward
from plait.schedule.step import Flush, Recv, Send, Wait
from plait.sharding import build_split
from plait.verify.static.context import check_ring
from tests.support.context_strategies import needs, plans

BUILD = {"forward": build_ring_forward, "backward": build_ring_backward}


def build_programs(table: Needs, direction: str, size: int = 20) -> list[RingProgram]:
    split = build_split(size, table.degree)
    return [BUILD[direction](table, split, rank) for rank in range(table.degree)]


@given(needs(), st.sampled_from(list(BUILD)), st.integers(0, 20))
def test_each_block_meets_each_rank_that_sees_it_once_and_gradients_come_home(
    table: Needs, direction: str, size: int
) -> None:
    check_ring(build_programs(table, direction, size), table)


@given(plans(), st.sampled_from(list(BUILD)))
def test_so_it_does_under_any_mask(plan: ContextPlan, direction: str) -> None:
    table = plan.needs
    programs = [BUILD[direction](table, plan.order.split, rank) for rank in range(plan.degree)]
    check_ring(programs, table)
    computed = sum(isinstance(step, Attend) for program in programs for step in program.steps)
    assert computed == plan.degree**2 - table.num_skipped


def test_a_full_ring_sends_its_block_on_while_it_computes() -> None:
    program = build_programs(Needs(((True,) * 3,) * 3), "forward", 6)[0]
    assert [str(step) for step in program.steps] == [
        "recv value kv[4:6] 2 -> 0",
        "send value kv[0:2] 0 -> 1",
        "attend 0",
        "wait value kv[4:6] 2 -> 0",
        "flush kv",
        "recv value kv[2:4] 2 -> 0",
        "send value kv[4:6] 0 -> 1",
        "attend 2",
        "wait value kv[2:4] 2 -> 0",
        "flush kv",
        "attend 1",
        "flush kv",
    ]


def test_what_nobody_sees_is_not_sent() -> None:
    window = Needs(tuple(tuple(owner in (rank, rank - 1) for owner in range(4)) for rank in range(4)))
    forward = [program.messages_sent for program in build_programs(window, "forward")]
    assert [[str(message) for message in sent] for sent in forward] == [
        ["value kv[0:5] 0 -> 1"], ["value kv[5:10] 1 -> 2"], ["value kv[10:15] 2 -> 3"], []
    ]  # fmt: skip
    backward = build_programs(window, "backward")
    assert [str(message) for message in backward[3].messages_sent] == ["addend dkv[10:15] 3 -> 2"]


def change(programs: list[RingProgram], rank: int, steps: Callable[[list[RingStep]], list[RingStep]]) -> None:
    programs[rank] = replace(programs[rank], steps=tuple(steps(list(programs[rank].steps))))


def drop(kind: type, number: int = 0) -> Callable[[list[RingStep]], list[RingStep]]:
    def change_steps(steps: list[RingStep]) -> list[RingStep]:
        chosen = [step for step in steps if isinstance(step, kind)][number]
        return [step for step in steps if step is not chosen]

    return change_steps


def swap_first(kind: type, new: RingStep) -> Callable[[list[RingStep]], list[RingStep]]:
    def change_steps(steps: list[RingStep]) -> list[RingStep]:
        first = next(step for step in steps if isinstance(step, kind))
        return [new if step is first else step for step in steps]

    return change_steps


def repeat_last_attend(steps: list[RingStep]) -> list[RingStep]:
    last = next(step for step in reversed(steps) if isinstance(step, Attend))
    return [*steps[:-1], last, steps[-1]]


def compute_first(steps: list[RingStep]) -> list[RingStep]:
    return sorted(steps, key=lambda step: not isinstance(step, Attend))


MISTAKES = {
    "a block is never computed": ("forward", drop(Attend, 1), "the keys of rank 0 were never attended, which rank 1"),
    "a block is computed twice": ("forward", repeat_last_attend, "the keys of rank . were attended before"),
    "another rank's block": ("forward", swap_first(Attend, Attend(2)), "the keys of rank 2 are not there"),
    "before it has come": ("forward", compute_first, "the keys of rank 0 are not there"),
    "a block is not sent on": ("forward", drop(Send, 1), "is posted and never sent"),
    "a block is not received": ("forward", drop(Recv, 1), "is sent and never posted"),
    "nobody waits": ("forward", drop(Wait), "is sent and never waited for"),
    "rounds that go on": ("forward", drop(Flush, -1), "it does not end with a flush"),
    "a gradient without the own part": (
        "backward", swap_first(Sum, Sum(0, False, False)), "the gradient for its keys is of ranks"
    ),
    "a gradient that is not summed": ("backward", drop(Sum), "the sum for rank 0 is not there"),
    "the wrong gradient": ("backward", swap_first(Sum, Sum(2, True, False)), "the own addend is not there"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_proof_finds(mistake: str) -> None:
    direction, change_steps, message = MISTAKES[mistake]
    table = Needs(((True,) * 4,) * 4)
    programs = build_programs(table, direction)
    change(programs, 1, change_steps)
    with pytest.raises(ScheduleError, match=message):
        check_ring(programs, table)


def test_rounds_out_of_order_are_found() -> None:
    table = Needs(((True,) * 3,) * 3)
    programs = build_programs(table, "backward")
    first, second = [step for step in programs[0].steps if isinstance(step, Send)][:2]
    steps = {first: second, second: first}
    programs[0] = replace(programs[0], steps=tuple(steps.get(step, step) for step in programs[0].steps))
    with pytest.raises(ScheduleError, match="round 0 comes after round 3"):
        check_ring(programs, table)


def test_all_blocks_at_once_are_more_memory_than_a_ring_may_take() -> None:
    table = Needs(((True,) * 4,) * 4)
    programs = build_programs(table, "forward")
    for rank in range(4):
        change(programs, rank, lambda steps: sorted(steps, key=lambda step: not isinstance(step, Recv)))
    with pytest.raises(ScheduleError, match="3 blocks of others at once, above 2"):
        check_ring(programs, table)


def test_tokens_of_other_ranks_than_there_are_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match="^ring attention of 3 ranks: rank 0 with tokens cut as 0:4, 4:8"):
        build_ring_forward(Needs(((True,) * 3,) * 3), build_split(8, 2), 0)
