"""The report passes only if everything does, and says what does not."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from plait.contract.collective import Collective
from plait.overlap.receipt import Receipt
from plait.sharding import Kind
from plait.verify.report import ExactCheck, RecipeError, Report, TensorError, TraceCheck
from plait.verify.static.budget import ErrorBudget
from plait.verify.static.trace import find_difference
from plait.verify.table import build_table

GATHER = Collective(Kind.ALL_GATHER, "tp", 2, (14, 64), "float32")
BUDGET = ErrorBudget("float32", 256, 36)
GOOD = Report(
    subject={"model": "llama-tiny", "mesh": "tp=2", "sequence_parallel": True},
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


QUANTIZED = replace(
    GOOD,
    subject={**GOOD.subject, "quantization": "nvfp4"},
    errors=(*GOOD.errors, TensorError("calibrated logits", "logits", 1e-8, 2e-8)),
    traces=(*GOOD.traces, TraceCheck(0, 1, phase="calibrated")),
    recipe_errors=(
        RecipeError("loss", "loss", 1e-3),
        RecipeError("calibrated gradient", "layers.0.attention_norm.weight", 0.25),
        RecipeError("calibrated gradient", "layers.1.attention_norm.weight", 0.75),
    ),
)


def test_what_a_recipe_does_is_stated_and_fails_nothing():
    assert QUANTIZED.passed
    assert QUANTIZED.verdict.startswith(
        "PASS: llama-tiny at tp=2 with sequence parallelism equals its unsharded fp64 twin"
    )
    assert "twin under nvfp4 (8 of 8 checks)" in QUANTIZED.verdict
    rows = {row.what: (row.num_tensors, row.median, row.worst.name) for row in QUANTIZED.recipe_rows}
    assert rows == {
        "loss": (1, 1e-3, "loss"),
        "calibrated gradient of layers.*.attention_norm": (2, 0.5, "layers.1.attention_norm.weight"),
    }
    assert [error["error"] for error in QUANTIZED.to_json()["recipe_errors"]] == [1e-3, 0.25, 0.75]


def test_phases_are_told_apart():
    assert "calibrated logits" in {row.what for row in QUANTIZED.rows}
    failing = replace(QUANTIZED, traces=(TraceCheck(1, 1, find_difference([GATHER], []), phase="calibrated"),))
    assert failing.failures[0].startswith("calibrated collectives of rank 1: collective 0 is missing")
    assert failing.to_json()["traces"][0]["phase"] == "calibrated"


@pytest.mark.parametrize("width", [100, 120])
def test_tables_of_a_recipe_fit_a_terminal(width):
    text = render(QUANTIZED, width=width)
    assert "error of nvfp4" in text
    assert "calibrated gradient of layers.*.attention_norm        2" in text
    assert "stated, not judged" in text
    assert max(map(len, text.splitlines())) <= width


def test_an_error_that_is_infinite_is_null_in_json():
    report = replace(QUANTIZED, recipe_errors=(RecipeError("loss", "loss", float("inf")),))
    assert report.to_json()["recipe_errors"][0]["error"] is None
