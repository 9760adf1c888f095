"""`plait bench planner`: predictions beside measured rows, without torch."""

import json
from pathlib import Path

import pytest

from plait.cli.main import main

ROW = {
    "id": "one", "source": "a paper", "kind": "gemm_time", "value": 1.0, "unit": "ms", "precision": "bf16",
    "hardware": {"gpu": "H100"}, "model": {"shape": "M=4096 N=4096 K=4096"},
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


def test_the_table_lists_what_is_not_covered(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--rows", str(path))
    assert status == 0
    assert "two: there is no prediction of kind 'unheard_of'" in out


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--rows", str(tmp_path / "none.jsonl"))
    assert status == 2
    assert "cannot be read" in err
