"""Rows are read with what they have; what they lack becomes a reason, and what is no row an error with its line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.planner.score.report import answer_row, score_rows
from plait.planner.score.row import load_rows, parse_row

_STEP: dict[str, Any] = {
    "id": "x", "source": "s", "kind": "iteration_time", "value": 1.0, "unit": "s", "precision": "bf16",
    "hardware": {"gpu": "H100-SXM5-80GB", "count": 8},
    "model": {
        "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 4096, "vocab": 32000, "seq": 2048,
        "mlp": "swiglu",
    },
    "parallel": {"tp": 2, "sp": True, "pp": 2, "dp": 2, "micro_batch": 1, "global_batch": 8},
}  # fmt: skip


def _answer(**changes: Any) -> object:
    return answer_row(parse_row({**_STEP, **changes}))


def test_a_row_without_what_is_optional_is_answered() -> None:
    parallel = {"tp": 2, "pp": 2, "global_batch": 8}
    assert not isinstance(_answer(parallel=parallel, precision=None, notes=None), str)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {**_STEP["model"], "ffn": 1e308}}, "model.ffn is 1e+308, not a whole number from 1 to 1e+15"),
        ({"parallel": {**_STEP["parallel"], "global_batch": 10**400}}, "not a whole number from 1 to 1e+15"),
        ({"kind": "colour"}, "no prediction of kind 'colour'"),
        ({"hardware": {"gpu": "Abacus"}}, 'no hardware "Abacus"'),
        ({"hardware": None}, "hardware.gpu is not given"),
        ({"model": None}, "model.layers is not given"),
        ({"model": {**_STEP["model"], "heads": 7}}, "not a model"),
        ({"parallel": {**_STEP["parallel"], "tp": "two"}}, "parallel.tp is 'two'"),
        ({"parallel": {**_STEP["parallel"], "recompute": "by moonlight"}}, "recompute is 'by moonlight'"),
        ({"parallel": {**_STEP["parallel"], "recompute": "per-op selective"}}, "recompute of every other operation"),
        ({"parallel": {**_STEP["parallel"], "dp": 3}}, "global batch of 8 sequences"),
        ({"parallel": {**_STEP["parallel"], "dp": None}, "hardware": {"gpu": "H100"}}, "neither dp nor the number"),
        ({"parallel": {**_STEP["parallel"], "tp": 64, "dp": 1}}, "cannot be"),
        ({"precision": "nvfp4"}, "has no law"),
        ({"precision": "fp8 rowwise"}, "rowwise scales have no law"),
        ({"notes": "deterministic-mode"}, "deterministic kernels"),
        ({"parallel": {**_STEP["parallel"], "pp": float("inf")}}, "parallel.pp is inf"),
        ({"parallel": {**_STEP["parallel"], "pp": float("nan")}}, "parallel.pp is nan"),
        ({"unit": "fortnights"}, "not one of time"),
        ({"unit": " "}, "not one of time"),
        ({"kind": "hw_tflops", "unit": "s"}, "not one of a rate of computing"),
        ({"kind": "tokens_per_s_gpu", "unit": "s"}, "is not tokens/s"),
        ({"kind": "layer_time", "unit": "ms"}, "neither forward nor backward"),
        ({"kind": "collective_time", "parallel": {"op": "broadcast", "bytes": 1}}, "'broadcast' has no law"),
        ({"kind": "overlap_kernel_time"}, "no shape M, N, K"),
        ({"kind": "peak_memory", "unit": "pages"}, "not one of memory"),
        ({"kind": "gemm_time", "unit": "us", "model": {"m": 1, "n": 2}}, "model.k is not given"),
    ],
)
def test_what_a_row_lacks_is_the_reason_why_it_is_not_covered(changes: dict[str, Any], reason: str) -> None:
    answer = _answer(**changes)
    assert isinstance(answer, str)
    assert reason in answer


def test_runs_that_are_not_deterministic_are_covered() -> None:
    assert not isinstance(_answer(notes="non-deterministic kernels"), str)
    assert not isinstance(_answer(notes="nondeterministic"), str)


def test_units_of_a_rate_are_those_of_the_row() -> None:
    tera, giga = (_answer(kind="hw_tflops", unit=unit) for unit in ("TFLOP/s/GPU", "GFLOP/s"))
    assert giga.predicted == pytest.approx(1000 * tera.predicted)  # type: ignore[attr-defined]


def test_a_layer_is_timed_in_the_direction_that_its_row_measures() -> None:
    notes = "fwd and bwd of one layer"
    forward, backward, named = (
        _answer(kind="layer_time", unit="ms", notes=notes, **said)
        for said in ({}, {"measure": "bwd"}, {"id": "gpt_bwd"})
    )
    assert backward == named
    assert backward.predicted > 1.5 * forward.predicted  # type: ignore[attr-defined]


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.sampled_from(["hardware", "model", "parallel"]),
    st.sampled_from(
        ["tp", "pp", "cp", "seq", "layers", "gpu", "bytes", "op", "dp", "micro_batch", "heads", "shape", "m"]
    ),
    _JUNK,
    st.sampled_from(
        ["iteration_time", "gemm_time", "collective_time", "peak_memory", "overlap_speedup", "layer_time", "mfu"]
    ),
)
def test_no_content_of_a_row_is_an_exception(table: str, key: str, value: object, kind: str) -> None:
    record = {**_STEP, "kind": kind, table: {**_STEP[table], key: value}}
    report = score_rows([parse_row(record)])
    assert report.rows[0].covered or report.rows[0].reason
    json.dumps(report.to_json())


def test_lines_that_are_no_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n\nnot json\n[1]\n' + json.dumps({**_STEP, "value": -1}) + "\n")
    with pytest.raises(ConfigError) as caught:
        load_rows(path)
    message = str(caught.value)
    assert "line 1: has no source, kind, value, unit" in message
    assert "line 3" in message
    assert "line 4: should be an object" in message
    assert "line 5: value is -1" in message


def test_a_file_that_is_not_there_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        load_rows(tmp_path / "none.jsonl")


@pytest.mark.parametrize("value", [10**400, 1e308, 1e-308, float("inf"), float("nan"), -1.0, True, "1"])
def test_a_value_of_which_no_ratio_is_a_number_is_no_value(value: object) -> None:
    with pytest.raises(ValueError, match="not a positive number"):
        parse_row({**_STEP, "value": value})


def test_brackets_too_deep_are_a_line_that_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="line 1: maximum recursion depth"):
        load_rows(tmp_path / "rows.jsonl")
