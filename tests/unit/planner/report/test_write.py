import sys
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.planner.report import check_can_write, write_report
from tests.support.planned_report import build_report


def test_the_page_is_written_with_the_library_in_it(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    path = tmp_path / "report.html"
    write_report(build_report(), path)
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "Plotly" in page
    assert path.stat().st_size < 8e6


def test_without_plotly_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match="a report needs plotly, which is not installed") as caught:
        write_report(build_report(), tmp_path / "report.html")
    assert caught.value.hint == "pip install 'plait[report]'"
    assert list(tmp_path.iterdir()) == []


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a report is an .html file"):
        check_can_write(tmp_path / "report.pdf")


def test_a_missing_folder_is_named_before_anything_is_searched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        check_can_write(tmp_path / "nowhere" / "report.html")
