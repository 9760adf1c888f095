"""One program timed for all ranks equals all ranks timed together, whatever the method."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ScheduleError
from plait.planner.step.clock import time_symmetric
from plait.schedule.costs import Costs
from plait.schedule.program import build_program, list_methods
from plait.schedule.simulate import simulate
from plait.schedule.step import Method, Program, Wait
from plait.schedule.work import Operation, derive_work
from plait.sharding import Invariant, Partial, Placement, Replicate, Shard, derive_transition

_ENTRY = (Operation.COLUMN_FORWARD, Operation.COLUMN_BACKWARD)


@given(
    st.sampled_from(Operation),
    st.sampled_from([Shard(0), Invariant()]),
    st.integers(2, 8),
    st.integers(1, 4),
    st.floats(0.01, 10),
    st.floats(0, 3),
)
def test_one_rank_stands_for_all(
    operation: Operation, state: Placement, degree: int, chunks: int, row_s: float, latency_s: float
) -> None:
    entry, leave = derive_transition(state, Replicate()), derive_transition(Partial(), state)
    work = derive_work(operation, entry if operation in _ENTRY else leave, 12 * degree, degree)
    costs = Costs(
        dict.fromkeys(work.gemms, float),
        {flow.tensor: row_s for flow in work.flows},
        latency_s=latency_s,
        bytes_per_s=1.0,
        add_row_s=0.25,
        step_s=0.125,
        collect_s={flow.tensor: 7.0 for flow in work.flows},
    )
    for method in list_methods(work):
        programs = [build_program(work, method, chunks, rank) for rank in range(degree)]
        together_s = simulate(programs, costs).duration_s
        assert time_symmetric(programs[degree // 2], costs) == pytest.approx(together_s, rel=1e-9), method


def test_a_program_that_waits_for_what_it_has_not_sent_is_refused() -> None:
    work = derive_work(Operation.ROW_FORWARD, derive_transition(Partial(), Shard(0)), 8, 2)
    program = build_program(work, Method.DIRECT, 1, 0)
    stuck = Program(
        program.method, 1, 0, program.flows, program.gemms,
        (*(step for step in program.steps if isinstance(step, Wait)), *program.steps),
    )  # fmt: skip
    with pytest.raises(ScheduleError, match="waits for addend"):
        time_symmetric(stuck, Costs({}, {"y": 1.0}))
