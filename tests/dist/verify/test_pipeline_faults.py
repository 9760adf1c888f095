"""A verification finds what can go wrong between stages, and says where."""

import pytest

from tests.support.pipeline_faults import FAULTS, FaultyRanks
from tests.support.verification import verify

ASKED = (
    "model.num_layers=2",
    "train.gradient_accumulation=2",
    "parallel.pp=2",
    "pipeline.schedule=zero_bubble",
)

ONLY_IN_TRACES = {"both halves of backward twice"}
"""Gradients of weights that are computed for nothing are thrown away."""


def test_without_a_mistake_the_same_verification_passes(ranks):
    report = verify(ranks(4), "gpt-tiny", 2, *ASKED)
    assert report.passed, report.failures


@pytest.mark.parametrize("fault", FAULTS)
def test_every_mistake_is_found(ranks, fault):
    report = verify(FaultyRanks(ranks(4), fault), "gpt-tiny", 2, *ASKED)
    assert not report.passed
    numbers_hold = all(row.passed for row in report.rows)
    traces_hold = all(trace.passed for trace in report.traces)
    is_extra = fault in ONLY_IN_TRACES
    assert (numbers_hold, traces_hold) == (is_extra, not is_extra), report.failures
