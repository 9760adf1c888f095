"""Why another plan was not chosen."""

import pytest

from plait.config.presets import load_preset
from plait.errors import ConfigError
from plait.planner import Cluster, PlanReport, load_hardware, plan, why_not


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return plan(load_preset("llama3-8b"), Cluster(load_hardware("h100"), 16), seq_len=4096, global_batch=64)


def test_slower_says_by_how_much_and_which_term(report: PlanReport) -> None:
    answer = why_not(report, "tp=16")
    assert answer.prediction is not None
    assert answer.reason.startswith("tp = 16 is slower: ")
    assert answer.reason.endswith(f"{answer.terms[0][0]} grows most, by 1.46 s")
    longer_s = answer.prediction.step_s - report.best.step_s
    assert sum(seconds for _, seconds in answer.terms) == pytest.approx(longer_s)


def test_what_does_not_divide_is_said(report: PlanReport) -> None:
    assert why_not(report, "tp=3").reason == "tp = 3 cannot be: fixed: tp = 3 does not divide 16 devices"
    assert why_not(report, {"tp": 32}).prediction is None


def test_what_does_not_fit_says_by_how_much(report: PlanReport) -> None:
    answer = why_not(report, "tp=1,pp=1,cp=1,sharded=nothing")
    assert answer.prediction is not None
    lacking = -answer.prediction.memory.margin_bytes / 1e9
    assert answer.reason.endswith(f"the leanest lacks {lacking:.1f} GB on the worst rank")


def test_the_chosen_one_was_chosen(report: PlanReport) -> None:
    assert why_not(report, f"tp={report.best.plan.tp}").reason.endswith("is what was chosen")


def test_what_is_not_searched_may_be_faster_and_says_how_to_get_it(report: PlanReport) -> None:
    for asked in ("quantization=fp8_delayedscaling", f"tp={report.best.plan.tp},quantization=fp8_delayedscaling"):
        answer = why_not(report, asked)
        assert answer.prediction is not None
        assert answer.prediction.step_s < report.best.step_s
        assert " is faster: " in answer.reason
        assert answer.reason.endswith("less; number formats are not searched: --fix quantization=fp8_delayedscaling")


def test_what_changes_nothing_is_not_called_chosen(report: PlanReport) -> None:
    assert report.best.plan.tp == 1
    assert why_not(report, "overlap=disabled").reason == "overlap = disabled makes no difference at tp 1"
    assert why_not(report, "sequence_parallel=false").reason == "sequence_parallel = false makes no difference at tp 1"
    assert why_not(report, "sequence_parallel=true").reason.endswith("is what was chosen")


def test_nonsense_is_refused(report: PlanReport) -> None:
    with pytest.raises(ConfigError, match="why-not"):
        why_not(report, "tq=4")
