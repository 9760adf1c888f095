"""`plait bench planner`: predictions beside measured rows, without torch."""

import json
import re
from pathlib import Path

import pytest

from plait.cli.main import main

ROW = {
    "id": "one", "source": "a paper", "kind": "gemm_time", "value": 1.0, "unit": "ms", "precision": "bf16",
    "hardware": {"gpu": "A100-SXM4-80GB"}, "model": {"m": 4096, "n": 4096, "k": 4096},
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [ROW, {**ROW, "id": "two", "kind": "unheard_of"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as status:
        main(["bench", "planner", *arguments])
    return status.value.code, *capsys.readouterr()


def test_json_has_every_row_and_source(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--rows", str(path), "--json")
    record = json.loads(out)
    assert status == 0
    assert [row["id"] for row in record["rows"]] == ["one", "two"]
    assert record["rows"][1]["covered"] is False
    assert "unheard_of" in record["rows"][1]["reason"]
    for row in record["rows"]:
        assert set(row) == {
            "id", "covered", "reason", "predicted", "measured", "unit", "relative_error", "null_relative_error",
        }  # fmt: skip
    for source in record["sources"]:
        assert set(source) == {"source", "kind", "n", "mape", "bias", "max", "null_mape", "null_max"}


def test_what_is_not_covered_is_counted_by_reason(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(path.read_text() + json.dumps({**ROW, "id": "three", "kind": "unheard_of"}) + "\n")
    status, out, _ = run(capsys, "--rows", str(path))
    assert status == 0
    assert "1 of 3 rows are covered" in out
    assert "  2 rows: there is no prediction of kind 'unheard_of'" in out
    assert "--json lists every row" in out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_is_cut_in_80_columns(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    source = "NVIDIA/dgxc-benchmarking v25.01 nemotron/README_15b.md with a long name"
    rows = [{**ROW, "source": source}, {**ROW, "id": "two", "kind": "of_a_kind_nobody_measured" * 4}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    _, styled, _ = run(capsys, "--rows", str(path))
    out = re.sub(r"\x1b\[[0-9;]*m", "", styled)
    assert max(map(len, out.splitlines())) <= 80
    assert "\u2026" not in out
    assert all(word in out for word in (*source.split(), *["rows", "MAPE", "bias", "max", "null"]))
    assert is_terminal or all(line == line.rstrip() for line in out.splitlines())


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--rows", str(tmp_path / "none.jsonl"))
    assert status == 2
    assert "cannot be read" in err
