"""The simulated clock obeys the laws of time, and agrees with closed forms."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.schedule.costs import Costs, estimate_collective_s
from plait.schedule.simulate import simulate
from plait.schedule.step import Method, Send
from plait.schedule.timeline import Timeline, Track
from plait.schedule.work import (
    Work,
    derive_column_backward,
    derive_column_forward,
    derive_row_backward,
    derive_row_forward,
)
from tests.support.strategies import ENTRIES, EXITS, Schedule, build_schedule, schedules

TOLERANCE = 1e-9
"""Sums of some hundred durations of about one."""

seconds = st.floats(0.0, 2.0)
positive = st.floats(0.01, 2.0)


def _linear(per_row_s: float) -> Callable[[int], float]:
    return lambda num_rows: per_row_s * num_rows


@st.composite
def machines(draw: st.DrawFn, *, contention: st.SearchStrategy[float] | None = None) -> Costs:
    """Any machine; one row is one byte, and the library's collectives move no more than they must."""
    contention = st.sampled_from([0.0, 0.3, 1.0]) if contention is None else contention
    return Costs(
        gemm_s={gemm: _linear(draw(seconds)) for gemm in ("forward", "dgrad", "wgrad")},
        row_bytes=dict.fromkeys(("x", "y", "dx", "dy"), 1.0),
        latency_s=draw(seconds),
        bytes_per_s=1 / draw(positive),
        add_row_s=draw(seconds),
        step_s=draw(seconds),
        collect_s=dict.fromkeys(("x", "y", "dx", "dy"), draw(seconds)),
        contention=draw(contention),
    )


def _run(work: Work, degree: int, method: Method, chunks: int, costs: Costs) -> Timeline:
    return simulate(build_schedule(work, degree, method, chunks).programs, costs)


@given(schedule=schedules(max_degree=5, max_rows=12), costs=machines())
def test_nothing_is_faster_than_its_computation_its_communication_or_its_waiting(
    schedule: Schedule, costs: Costs
) -> None:
    timeline = simulate(schedule.programs, costs)
    for usage in timeline.usage:
        assert timeline.duration_s >= max(usage.compute_s, usage.communication_s) - TOLERANCE
        assert timeline.duration_s >= usage.compute_s + usage.exposed_s - TOLERANCE


@given(schedule=schedules(max_degree=5, max_rows=12), costs=machines())
def test_a_track_does_one_thing_at_a_time(schedule: Schedule, costs: Costs) -> None:
    timeline = simulate(schedule.programs, costs)
    events = sorted(timeline.events, key=lambda event: (event.rank, event.track, event.start_s))
    for _, track in groupby(events, key=lambda event: (event.rank, event.track)):
        for before, after in pairwise(track):
            assert before.end_s <= after.start_s + TOLERANCE
    assert all(0 <= event.start_s < event.end_s <= timeline.duration_s + TOLERANCE for event in events)


@given(schedule=schedules(max_degree=5, max_rows=12, moves=True), costs=machines(contention=st.just(0.0)))
def test_every_message_is_there_before_it_is_waited_for_and_sent_before_it_is_there(
    schedule: Schedule, costs: Costs
) -> None:
    timeline = simulate(schedule.programs, costs)
    for program in schedule.programs:
        moved = [event for event in timeline.events if event.rank == program.rank]
        for track, messages in ((Track.SEND, program.messages_sent), (Track.RECV, program.messages_received)):
            by_round = sorted(messages, key=lambda message: message.round)
            assert [event.what for event in moved if event.track is track] == by_round


@given(schedule=schedules(max_degree=5, max_rows=12), costs=machines(contention=st.just(0.0)), factor=st.floats(1, 4))
def test_a_faster_link_is_never_slower(schedule: Schedule, costs: Costs, factor: float) -> None:
    fast = replace(costs, bytes_per_s=costs.bytes_per_s * factor)
    assert simulate(schedule.programs, fast).duration_s <= simulate(schedule.programs, costs).duration_s + TOLERANCE


@given(schedule=schedules(max_degree=5, max_rows=12), costs=machines(contention=st.just(0.0)))
def test_compute_lasts_as_long_as_its_steps_do(schedule: Schedule, costs: Costs) -> None:
    work, timeline = schedule.work, simulate(schedule.programs, replace(costs, add_row_s=0.0))
    expected = sum(costs.gemm_s[gemm](work.num_rows) for gemm in work.gemms)
    assert [usage.compute_s for usage in timeline.usage] == [pytest.approx(expected)] * len(schedule.programs)


@given(schedule=schedules(max_degree=5, max_rows=12), costs=machines(contention=st.just(0.0)))
def test_a_core_that_also_moves_bytes_computes_longer(schedule: Schedule, costs: Costs) -> None:
    idle, busy = (simulate(schedule.programs, replace(costs, contention=share)) for share in (0.0, 0.5))
    for before, after in zip(idle.usage, busy.usage, strict=True):
        assert before.compute_s <= after.compute_s + TOLERANCE
        assert after.compute_s <= 2 * before.compute_s + TOLERANCE


def test_a_core_that_does_nothing_else_while_bytes_move_hides_nothing() -> None:
    """Two ranks gather one row of one second each and multiply two of two seconds."""
    work, costs = derive_column_forward(ENTRIES[True], 2, 2), _costs(gemm_s=2.0, row_s=1.0)
    durations = [
        _run(work, 2, Method.DIRECT, 1, replace(costs, contention=share)).duration_s for share in (0.0, 0.5, 1.0)
    ]
    assert durations == [4.0, 4.5, 5.0]


def _costs(*, gemm_s: float, row_s: float, add_row_s: float = 0.0, collect_s: float = 0.0) -> Costs:
    """The seconds of a row: of every GEMM, of a link, of a sum; and those of the library's collectives."""
    return Costs(
        gemm_s=dict.fromkeys(("forward", "dgrad", "wgrad"), _linear(gemm_s)),
        row_bytes=dict.fromkeys(("x", "y", "dx", "dy"), 1.0),
        bytes_per_s=1 / row_s,
        add_row_s=add_row_s,
        collect_s=dict.fromkeys(("x", "y", "dx", "dy"), collect_s),
    )


SIZES = [(degree, chunks) for degree in (2, 3, 4, 8) for chunks in (1, 2, 4)]


@pytest.mark.parametrize(("degree", "chunks"), SIZES)
@pytest.mark.parametrize("row_s", [0.5, 1.0, 1.25, 2.0, 8.0])
@pytest.mark.parametrize("method", [Method.DIRECT, Method.RING])
def test_one_boundary_costs_max_of_compute_and_communication_plus_a_piece(
    degree: int, chunks: int, row_s: float, method: Method
) -> None:
    """T(k) = max(P, C + P/(t k)): a GEMM beside a gather or a scatter, cut into k pieces a rank.

    Round a ring the next hop waits until the GEMM before it has ended, so where bytes are faster the last piece is as
    late as that; where they are slower, the form is the same.
    """
    num_rows = degree * chunks
    compute, communication = num_rows * 1.0, (degree - 1) * chunks * row_s
    for work in (
        derive_column_forward(ENTRIES[True], num_rows, degree),
        derive_row_forward(EXITS[True], num_rows, degree),
    ):
        timeline = _run(work, degree, method, chunks, _costs(gemm_s=1.0, row_s=row_s))
        assert timeline.duration_s == max(compute, communication + compute / num_rows)


@pytest.mark.parametrize(("degree", "chunks"), SIZES)
@pytest.mark.parametrize("row_s", [0.5, 1.0, 2.0, 8.0])
def test_backward_of_a_row_linear_hides_its_gather_under_both_gemms(degree: int, chunks: int, row_s: float) -> None:
    """The same with P of dgrad and wgrad, of which a piece each is behind what comes last.

    With one chunk, wgrad of all that others own is behind it, undivided; with more, what it lags behind is at most the
    pieces of an owner but one.
    """
    num_rows = degree * chunks
    work = derive_row_backward(EXITS[True], num_rows, degree)
    timeline = _run(work, degree, Method.DIRECT, chunks, _costs(gemm_s=1.0, row_s=row_s))
    behind = 2 if chunks > 1 else degree
    expected = max(2 * num_rows, (degree - 1) * chunks * row_s + behind)
    assert expected <= timeline.duration_s <= expected + (chunks - 1 if degree > 2 and row_s == 2.0 else 0)


@pytest.mark.parametrize("method", [Method.BULK, Method.DIRECT, Method.RING])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_backward_of_a_column_linear_hides_both_its_collectives(degree: int, method: Method) -> None:
    """Each of them takes 3/4 of the time of the GEMM that it is under."""
    num_rows = 4 * degree
    work = derive_column_backward(ENTRIES[True], num_rows, degree)
    costs = _costs(gemm_s=1.0, row_s=3 / 4 * degree / (degree - 1))
    assert _run(work, degree, method, 4, costs).duration_s == pytest.approx(2 * num_rows)


@given(schedule=schedules(max_degree=5, max_rows=24, moves=True, even=True), gemm_s=positive, row_s=positive)
def test_without_overheads_overlap_never_costs_time(schedule: Schedule, gemm_s: float, row_s: float) -> None:
    """Where rows divide; elsewhere the collective of the library is counted as waiting for nobody, which none does."""
    work, degree = schedule.work, len(schedule.programs)
    costs = _costs(gemm_s=gemm_s, row_s=row_s)
    collect_s = {
        flow.tensor: estimate_collective_s(flow, 1.0, latency_s=0.0, bytes_per_s=1 / row_s) for flow in work.flows
    }
    serial = _run(work, degree, Method.NONE, 1, replace(costs, collect_s=collect_s))
    assert simulate(schedule.programs, costs).duration_s <= serial.duration_s + TOLERANCE


def test_the_figure_of_the_seed() -> None:
    """Four ranks, a GEMM of four units, a collective of four: both ends fall from eight units, to four and to five.

    Each of the three transfers takes a unit. A scatter has to sum at the end what the last transfers brought, with
    nothing left to compute beside it, which takes another.
    """
    gather, scatter = derive_column_forward(ENTRIES[True], 4, 4), derive_row_forward(EXITS[True], 4, 4)
    costs = _costs(gemm_s=1.0, row_s=1.0, add_row_s=1 / 3, collect_s=4.0)
    assert _run(gather, 4, Method.NONE, 1, costs).duration_s == 8.0
    assert _run(gather, 4, Method.DIRECT, 1, costs).duration_s == 4.0
    assert _run(scatter, 4, Method.NONE, 1, costs).duration_s == 8.0
    assert _run(scatter, 4, Method.DIRECT, 1, costs).duration_s == 5.0


def test_every_cost_is_counted_once() -> None:
    """Rank 0 of two: posts, sends, multiplies, waits for a message with latency, multiplies; all on one clock."""
    costs = Costs(
        gemm_s={"forward": lambda num_rows: 10.0 + num_rows},
        row_bytes={"x": 6.0},
        latency_s=20.0,
        bytes_per_s=2.0,
        step_s=100.0,
    )
    timeline = _run(derive_column_forward(ENTRIES[True], 2, 2), 2, Method.DIRECT, 1, costs)
    # Posted at 100, sent at 200, gone at 203, there at 223; multiplied from 200 to 211, and from 323 on.
    assert [(event.track, event.name, event.start_s, event.end_s) for event in timeline.events if event.rank == 0] == [
        (Track.COMPUTE, "forward[0:1]", 200.0, 211.0),
        (Track.SEND, "x[0:1] to 1", 200.0, 203.0),
        (Track.RECV, "x[1:2] from 1", 200.0, 203.0),
        (Track.COMPUTE, "forward[1:2]", 323.0, 334.0),
    ]
    assert timeline.duration_s == 334.0
    assert [usage.exposed_s for usage in timeline.usage] == [12.0, 12.0]
    assert (timeline.usage[0].compute_s, timeline.usage[0].communication_s, timeline.exposed_s) == (22.0, 3.0, 12.0)


def test_a_sum_costs_something_however_small() -> None:
    """Rank 1 of three sums three rows at once, when both addends have come."""
    work = derive_row_forward(EXITS[True], 3, 3)
    without = _costs(gemm_s=0.0, row_s=1.0, add_row_s=0.25)
    timeline = _run(work, 3, Method.DIRECT, 1, replace(without, add_s=10.0))
    (summed,) = [event for event in timeline.events if event.rank == 1 and event.name == "add y[1:2]"]
    assert (summed.start_s, summed.end_s) == (2.0, 12.5)


def test_a_link_carries_one_message_at_a_time_in_each_direction() -> None:
    """Three ranks exchange addends of a second each: two in a row leave and come, and each is waited for."""
    timeline = _run(
        derive_row_forward(EXITS[True], 3, 3), 3, Method.DIRECT, 1, _costs(gemm_s=0.0, row_s=1.0, add_row_s=0.25)
    )
    moved = [(event.track, event.name, event.start_s, event.end_s) for event in timeline.events if event.rank == 1]
    assert sorted(moved) == [
        (Track.COMPUTE, "add y[1:2]", 2.0, 2.5),
        (Track.RECV, "y[1:2] from 0", 1.0, 2.0),
        (Track.RECV, "y[1:2] from 2", 0.0, 1.0),
        (Track.SEND, "y[0:1] to 0", 0.0, 1.0),
        (Track.SEND, "y[2:3] to 2", 1.0, 2.0),
    ]


def test_a_flush_waits_for_what_is_still_leaving() -> None:
    """Rank 0 of two owns both rows, so it sends for longer than it computes."""
    timeline = _run(derive_column_forward(ENTRIES[True], 1, 2), 2, Method.DIRECT, 1, _costs(gemm_s=1.0, row_s=5.0))
    assert [(usage.compute_s, usage.exposed_s) for usage in timeline.usage] == [(1.0, 4.0), (1.0, 5.0)]


def test_a_collective_begins_when_the_last_rank_has_come() -> None:
    """A scatter whose ranks have computed alike; all wait for it, and it takes both directions of every link."""
    timeline = _run(
        derive_row_forward(EXITS[True], 4, 2), 2, Method.NONE, 1, _costs(gemm_s=1.0, row_s=1.0, collect_s=3.0)
    )
    assert timeline.duration_s == 7.0
    assert [(usage.communication_s, usage.exposed_s) for usage in timeline.usage] == [(3.0, 3.0)] * 2
    assert {(event.track, event.name) for event in timeline.events if event.start_s == 4.0} == {
        (Track.SEND, "collect y"),
        (Track.RECV, "collect y"),
    }


@pytest.mark.parametrize(("work", "seconds"), [
    (derive_column_forward(ENTRIES[True], 8, 4), 0.5 + 6 * 10 / 5),
    (derive_row_forward(EXITS[False], 8, 4), 0.5 + 2 * 6 * 10 / 5),
    (derive_column_forward(ENTRIES[True], 5, 4), 0.5 + 4 * 10 / 5),
])  # fmt: skip
def test_a_library_moves_what_the_rank_with_fewest_rows_lacks(work: Work, seconds: float) -> None:
    assert estimate_collective_s(work.flows[0], 10.0, latency_s=0.5, bytes_per_s=5.0) == seconds


def test_programs_that_wait_for_ever_are_refused() -> None:
    programs = build_schedule(derive_column_forward(ENTRIES[True], 2, 2), 2, Method.DIRECT, 1).programs
    first_waiting = sorted(programs[1].steps, key=lambda step: isinstance(step, Send))
    assert isinstance(first_waiting[-1], Send)
    mute = replace(programs[0], steps=tuple(sorted(programs[0].steps, key=lambda step: isinstance(step, Send))))
    with pytest.raises(ScheduleError, match="direct schedule never ends: ranks \\[0, 1\\] wait for ever"):
        simulate([mute, replace(programs[1], steps=tuple(first_waiting))], _costs(gemm_s=1.0, row_s=1.0))


def test_a_drawing_has_a_line_for_each_track() -> None:
    timeline = _run(derive_row_forward(EXITS[True], 4, 2), 2, Method.DIRECT, 2, _costs(gemm_s=1.0, row_s=1.0))
    assert (
        timeline.draw(width=48, ranks=(0,))
        == """\
rank 0 compute |forward[2:3|forward[3:4|forward[0:2]-----------|
rank 0 send                |y[2:3] to 1|y[3:4] to 1|
rank 0 recv                |y[0:1] from|y[1:2] from|"""
    )
