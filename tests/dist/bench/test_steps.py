"""Variants of one workload do the same work, each in its own way."""

from functools import partial

import pytest
import torch

from plait.bench.overlap import compare
from plait.bench.recorder import Recorder, build_sleepers
from plait.bench.variant import COMPUTE, LIBRARY, POINT_TO_POINT, Step, Variant
from plait.bench.watched_link import WatchedLink
from plait.bench.workload import build_workload
from plait.config.overlap import OverlapConfig
from plait.config.presets import load_preset
from plait.overlap.transport.ring import RingTransport
from plait.schedule.step import Multiply

OVERLAPPED = Variant("overlapped", OverlapConfig(policy="full", transport="ring", chunks=2))
NUM_TOKENS = 10

TOLERANCE = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
"""Sums are taken in other orders."""


def build_step(variant: Variant, what: str = "block", tp: int = 2) -> Step:
    return Step(build_workload(what, load_preset("llama-tiny"), NUM_TOKENS), variant, tp)


def run_all(what: str) -> None:
    steps = [build_step(variant, what) for variant in (LIBRARY, POINT_TO_POINT, OVERLAPPED)]
    for step in steps:
        step()
        step()
    for step in steps[1:]:
        TOLERANCE(step.y, steps[0].y)
        for leaf, expected in zip(step.leaves, steps[0].leaves, strict=True):
            if expected.grad is not None:
                TOLERANCE(leaf.grad, expected.grad)


@pytest.mark.parametrize("what", ["mlp", "attention", "block", "ends"])
def test_all_variants_compute_the_same(ranks, what):
    ranks(2).call(run_all, what=what)


def run_alone() -> list[list[int]] | None:
    """Shapes of the gradients on one rank, where the other does not even begin."""
    step = build_step(COMPUTE)
    if step.mesh.rank == 1:
        return None
    step()
    return [list(param.grad.shape) for param in step.module.parameters()]


def test_with_nothing_moved_a_rank_works_alone_on_the_same_shapes(ranks):
    shapes, nothing = ranks(2).call(run_alone)
    assert nothing is None
    assert shapes == ranks(2).call(list_gradients)[0]


def list_gradients() -> list[list[int]]:
    step = build_step(LIBRARY)
    step()
    return [list(param.grad.shape) for param in step.module.parameters()]


def run_watched() -> tuple[int, int, int]:
    """Messages of one step: seen by the link, of the programs, and how many of them have an end."""
    step = build_step(OVERLAPPED)
    links: list[WatchedLink] = []

    def build_link(axis):
        links.append(WatchedLink(axis))
        return links[0]

    step.matmul.transports["ring"] = RingTransport(step.mesh.tp, build_link)
    step()  # what it costs is measured over the same link
    before = len(links[0].transfers)
    step()
    plain = build_step(OVERLAPPED)
    plain()
    torch.testing.assert_close(step.y, plain.y, rtol=0, atol=0)
    programs = [chosen.program for chosen in step.matmul.chosen.values()]
    messages = sum(len(program.messages_sent) + len(program.messages_received) for program in programs)
    transfers = links[0].transfers[before:]
    return len(transfers), messages, sum(each.end_s >= each.issued_s > 0 for each in transfers)


def test_watched_link_moves_the_same_and_sees_every_message_through(ranks):
    for seen, messages, ended in ranks(2).call(run_watched):
        assert seen == messages == ended > 0


def run_recorded() -> dict[str, float]:
    step = build_step(OVERLAPPED, "mlp")
    step.matmul.instrument = recorder = Recorder(build_sleepers(1e12))
    step()
    rows = dict.fromkeys(("forward", "dgrad", "wgrad"), 0)
    for taken in recorder.taken:
        if isinstance(taken.step, Multiply):
            rows[taken.step.gemm] += len(taken.step.rows)
    assert {gemm for _, gemm in recorder.gemm_s} == set(rows)
    return rows


def test_recorder_sees_every_row_of_every_gemm(ranks):
    # Two linears (a gather group and a row linear), each forward, dgrad and wgrad.
    assert ranks(2).call(run_recorded) == [dict.fromkeys(("forward", "dgrad", "wgrad"), 2 * NUM_TOKENS)] * 2


def compare_asleep(flops_per_s: float) -> tuple[float, float]:
    workload = build_workload("mlp", load_preset("llama-tiny"), NUM_TOKENS)
    comparison = compare(workload, [OVERLAPPED], 2, rounds=1, replace=build_sleepers(flops_per_s))
    (run,) = comparison.overlapped
    return run.median_s, comparison.compute_s[0]


def test_gemms_that_sleep_take_as_long_as_their_flops_say(ranks):
    # 10 tokens, width 64, 96 columns on 2 ranks: three weights, each forward, dgrad and wgrad.
    flops = 3 * 3 * 2 * NUM_TOKENS * 64 * 48
    for run_s, compute_s in ranks(2).call(compare_asleep, flops_per_s=flops / 0.2):
        assert run_s >= 0.2
        assert compute_s >= 0.2
