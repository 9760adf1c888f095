import re

import pytest

from tests.support.source_tree import PACKAGE, ROOT, list_files

VAGUE = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base"}
THE_BASE = PACKAGE / "overlap" / "transport" / "base.py"
"""What every transport offers: the one base there is."""
SOURCES = [
    path for folder in (PACKAGE, ROOT / "tests", ROOT / "examples", ROOT / "benchmarks") for path in list_files(folder)
]


def test_no_file_has_a_name_that_says_nothing() -> None:
    vague = [path for path in SOURCES if path.stem in VAGUE or path.parent.name in VAGUE]
    assert vague == [THE_BASE]


def test_code_is_ascii() -> None:
    """It survives every terminal and log. A test's data may be anything, written as an escape."""
    assert [path for path in SOURCES if not path.read_text().isascii()] == []


def test_annotations_stay_real_objects() -> None:
    """Pydantic and click read them; a future import would turn them into text."""
    assert [path for path in SOURCES if "from __future__" + " import annotations" in path.read_text()] == []


@pytest.mark.parametrize("vague", ["Manager", "Helper", "Handler", "Engine"])
def test_no_class_is_named_for_managing(vague: str) -> None:
    pattern = re.compile(rf"^class \w*{vague}\b", re.MULTILINE)
    assert [path for path in list_files() if pattern.search(path.read_text())] == []
