"""The report passes only if everything does, and says what does not."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from plait.contract.collective import Collective
from plait.overlap.receipt import Receipt
from plait.sharding import Kind
from plait.verify.report import ExactCheck, Report, TensorError, TraceCheck
from plait.verify.static.budget import ErrorBudget
from plait.verify.static.trace import find_difference
from plait.verify.table import build_table

GATHER = Collective(Kind.ALL_GATHER, "tp", 2, (14, 64), "float32")
BUDGET = ErrorBudget("float32", 256, 36)
GOOD = Report(
    subject={"model": "llama-tiny", "tp": 2, "sequence_parallel": True},
    budget=BUDGET,
    errors=(
        TensorError("loss", "loss", 1e-8, 2e-8),
        TensorError("gradient", "layers.0.attention.wq.weight", 1e-6, 2e-6),
        TensorError("gradient", "layers.1.attention.wo.weight", 3e-6, 2e-6),
        TensorError("gradient", "norm.weight", 2e-6, 2e-6),
    ),
    exact=(ExactCheck("replicas", 3),),
    traces=(TraceCheck(0, 1), TraceCheck(1, 1)),
    receipt=Receipt(note="nothing to overlap"),
)
BAD = {
    "an error above the budget": {"errors": (*GOOD.errors, TensorError("gradient", "head.weight", 1e-2, 1e-6))},
    "an infinite error": {"errors": (*GOOD.errors, TensorError("gradient", "head.weight", float("inf"), 1e-6))},
    "an error that is no number": {"errors": (*GOOD.errors, TensorError("gradient", "head.weight", float("nan"), 0.0))},
    "a tensor that is not equal": {"exact": (ExactCheck("replicas", 3, ("norm.weight differs",)),)},
    "an exact check of nothing": {"exact": (ExactCheck("replicas", 0),)},
    "a trace that is not the contract": {"traces": (TraceCheck(0, 1, find_difference([GATHER], [])),)},
    "nothing compared": {"errors": ()},
    "no traces": {"traces": ()},
}


def render(report, width=120):
    text = StringIO()
    Console(file=text, width=width).print(build_table(report))
    return text.getvalue()


def test_report_passes_when_everything_holds():
    assert GOOD.passed
    assert GOOD.verdict == (
        "PASS: llama-tiny at tp=2 with sequence parallelism equals its unsharded fp64 twin (6 of 6 checks)"
    )


@pytest.mark.parametrize("what", BAD)
def test_report_fails_on(what):
    report = replace(GOOD, **BAD[what])
    assert not report.passed
    assert report.verdict.startswith("FAIL")
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["passed"] is False


def test_rows_show_the_worst_tensor_of_each_family():
    rows = {row.what: (row.num_tensors, row.worst.name) for row in GOOD.rows}
    assert rows == {
        "loss": (1, "loss"),
        "gradient of layers.*.attention": (2, "layers.1.attention.wo.weight"),
        "gradient of norm": (1, "norm.weight"),
    }


def test_an_error_that_is_no_number_is_the_worst_of_its_family():
    errors = (
        TensorError("gradient", "head.weight", float("nan"), 0.0),
        TensorError("gradient", "head.bias", 1e-6, 0.0),
    )
    assert not replace(GOOD, errors=errors).rows[0].passed
    assert not replace(GOOD, errors=errors[::-1]).rows[0].passed


def test_table_shows_error_budget_and_reordering_error_of_every_row():
    row = "gradient of layers.*.attention  layers.1.attention.wo.weight  3.0e-06  4.9e-05     2.0e-06  pass"
    assert row in render(GOOD)


def test_table_names_what_fails_and_where_the_trace_leaves_the_contract():
    text = render(replace(GOOD, **BAD["an error above the budget"] | BAD["a trace that is not the contract"]))
    assert "gradient of head: head.weight is off by 1.0e-02, budget 4.9e-05" in text
    assert "collective 0 is missing (1 promised, 0 issued)" in text
    assert text.rstrip().endswith("(2 of 6 checks fail)")


def test_json_holds_every_tensor_and_every_rank():
    data = GOOD.to_json()
    assert [error["name"] for error in data["errors"]] == [error.name for error in GOOD.errors]
    assert [trace["rank"] for trace in data["traces"]] == [0, 1]
    assert data["budget"]["value"] == BUDGET.value
