"""A verification finds what can go wrong between stages, and says where."""

import pytest

from tests.support.pipeline_faults import FAULTS, SHARED_FAULTS, FaultyRanks
from tests.support.verification import verify

ASKED = (
    "model.num_layers=2",
    "train.gradient_accumulation=2",
    "parallel.pp=2",
    "pipeline.schedule=zero_bubble",
)

ONLY_IN_TRACES = {"both halves of backward twice", "gradients that are summed twice"}
"""What is computed or summed for nothing is thrown away."""


def test_without_a_mistake_the_same_verification_passes(ranks):
    report = verify(ranks(4), "gpt-tiny", 2, *ASKED)
    assert report.passed, report.failures


@pytest.mark.parametrize("fault", FAULTS)
def test_every_mistake_is_found(ranks, fault):
    check_found(verify(FaultyRanks(ranks(4), fault), "gpt-tiny", 2, *ASKED), fault)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_every_mistake_with_parameters_that_stages_share_out_is_found(ranks, fault, schedule):
    asked = (*ASKED[:-1], f"pipeline.schedule={schedule}", "parallel.dp_shard=2")
    assert verify(ranks(4), "gpt-tiny", 1, *asked).passed
    check_found(verify(FaultyRanks(ranks(4), fault), "gpt-tiny", 1, *asked), fault)


def check_found(report, fault):
    """By numbers, or by what is issued where numbers are as they should be."""
    assert not report.passed
    numbers_hold = all(row.passed for row in report.rows)
    traces_hold = all(trace.passed for trace in report.traces)
    is_extra = fault in ONLY_IN_TRACES
    assert (numbers_hold, traces_hold) == (is_extra, not is_extra), report.failures
