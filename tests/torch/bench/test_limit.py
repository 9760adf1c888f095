"""Ratios over rounds, and the limit that a schedule is measured against."""

from types import SimpleNamespace

import pytest

from plait.bench.limit import derive_limit
from plait.bench.rounds import Spread, find_ratio
from plait.overlap.site import Pass, Site
from plait.schedule.program import build_program
from plait.schedule.step import Method
from plait.schedule.work import Operation, derive_column_forward, derive_row_backward
from plait.sharding import Partial, Replicate, Shard, derive_transition

NUM_ROWS, DEGREE = 8, 2
SITE = Site("here", "mlp", width=1, features=1, dtype="float32")
ENTRY = derive_transition(Shard(0), Replicate())
EXIT = derive_transition(Partial(), Shard(0))
FORWARD = Pass(Operation.COLUMN_FORWARD, SITE, ENTRY, NUM_ROWS)
BACKWARD = Pass(Operation.ROW_BACKWARD, SITE, EXIT, NUM_ROWS)


def build_matmul(method: Method, chunks: int, *passes: Pass) -> SimpleNamespace:
    works = {
        FORWARD: derive_column_forward(ENTRY, NUM_ROWS, DEGREE),
        BACKWARD: derive_row_backward(EXIT, NUM_ROWS, DEGREE),
    }
    chosen = {
        what: SimpleNamespace(work=works[what], program=build_program(works[what], method, chunks, 0))
        for what in passes
    }
    return SimpleNamespace(axis=SimpleNamespace(degree=DEGREE, rank=0), chosen=chosen, begun_by={})


@pytest.mark.parametrize(
    ("method", "chunks", "compute_s", "communication_s", "schedule_s"),
    [
        (Method.NONE, 1, 8.0, 4.0, 12.0),  # one behind the other
        (Method.DIRECT, 1, 8.0, 4.0, 8.0),  # as long as the own rows take
        (Method.DIRECT, 1, 8.0, 8.0, 12.0),  # the other half comes at 8, and takes 4
        (Method.DIRECT, 4, 8.0, 8.0, 9.0),  # its last quarter takes 1
        (Method.DIRECT, 1, 10.0, 8.0, 14.0),  # 2 s of other work are hidden by nothing
    ],
)
def test_limit_is_the_larger_and_what_the_schedule_exposes(method, chunks, compute_s, communication_s, schedule_s):
    matmul = build_matmul(method, chunks, FORWARD)
    limit, timelines = derive_limit(matmul, {(FORWARD, "forward"): [8.0]}, [compute_s], [communication_s])
    assert limit.schedule_s == pytest.approx(schedule_s)
    assert limit.to_json()["head_and_tail_s"] == pytest.approx(schedule_s - max(compute_s, communication_s))
    assert len(timelines) == 1


def test_passes_share_the_communication_by_their_bytes():
    matmul = build_matmul(Method.DIRECT, 4, FORWARD, BACKWARD)
    gemm_s = {(FORWARD, "forward"): [2.0], (BACKWARD, "dgrad"): [8.0], (BACKWARD, "wgrad"): [8.0]}
    limit, _ = derive_limit(matmul, gemm_s, [18.0], [8.0])
    # Forward takes its 4 of communication and a last quarter of half of 2; backward hides its own 4.
    assert limit.schedule_s == pytest.approx(4 + 0.25 + 16)


def test_medians_make_the_limit_and_one_slow_round_does_not():
    matmul = build_matmul(Method.DIRECT, 1, FORWARD)
    limit, _ = derive_limit(matmul, {(FORWARD, "forward"): [8.0, 80.0, 8.0]}, [8.0, 80.0, 8.0], [4.0, 4.0, 40.0])
    assert (limit.compute_s, limit.communication_s, limit.schedule_s) == (8.0, 4.0, pytest.approx(8.0))


def test_ratio_is_of_medians_and_its_spread_of_rounds():
    ratio = find_ratio([2.0, 4.0, 60.0], [1.0, 1.0, 10.0])
    assert ratio == Spread(4.0, 3.0, 5.0)


def test_one_round_has_no_spread():
    assert find_ratio([3.0], [2.0]) == Spread(1.5, 1.5, 1.5)
