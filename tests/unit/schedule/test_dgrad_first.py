"""What a column's backward relies on where an activation stands behind it: dgrad fills the rows that wgrad reads."""

from itertools import product

import pytest

from plait.schedule.program import build_program, list_methods
from plait.schedule.step import Multiply
from plait.schedule.work import derive_column_backward
from plait.sharding import Invariant, Placement, Replicate, Shard, derive_transition


@pytest.mark.parametrize("outside", [Shard(0), Invariant()], ids=["sp", "ar"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_dgrad_of_all_rows_goes_before_any_wgrad(outside: Placement, degree: int) -> None:
    entry = derive_transition(outside, Replicate())
    for num_rows, chunks, rank in product((1, 3, 11, 24), (1, 2, 5), range(degree)):
        work = derive_column_backward(entry, num_rows, degree)
        for method in list_methods(work):
            steps = build_program(work, method, chunks, rank).steps
            gemms = [step for step in steps if isinstance(step, Multiply)]
            first_wgrad = next(place for place, step in enumerate(gemms) if step.gemm == "wgrad")
            before, after = gemms[:first_wgrad], gemms[first_wgrad:]
            assert sum(len(step.rows) for step in before) == num_rows, (method, num_rows, chunks, rank)
            assert {step.gemm for step in after} == {"wgrad"}, (method, num_rows, chunks, rank)
