import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256

import pytest

from plait.planner.report.page import build_page
from plait.planner.timeline import build_layer_charts
from tests.support.planned_report import EVIL, build_report

LIBRARY = "/* stands for plotly.js */\r\nvar Plotly = {};\n"


@pytest.fixture(scope="module")
def page() -> str:
    return _build(EVIL)


def _build(name: str, *, fits: bool = True) -> str:
    report = build_report(name, fits=fits)
    return build_page(report, build_layer_charts(report.best), LIBRARY)


def test_a_name_is_text_wherever_it_stands(page: str) -> None:
    assert page.count("<script") == 3  # the figures, the library and the page's own
    assert "<img" not in page
    assert "onerror=alert" in page  # escaped, so it is there to be read
    assert "&lt;script&gt;document.title" in page


def test_what_is_asked_is_fetched_from_nowhere(page: str) -> None:
    assert re.findall(r"(?:https?:)?//[a-z]", page) == []
    assert re.findall(r"<(?:link|iframe|img|object|embed)\b|\bsrc=\"|@import", page) == []
    assert "default-src 'none'" in page


def test_browsers_run_the_two_scripts_and_no_other(page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy is not None
    allowed = policy.group(1).split()
    assert allowed == [f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts]
    assert len(scripts) == 2


def test_equal_reports_give_equal_pages(page: str) -> None:
    assert _build(EVIL) == page
    assert _build("another") != page


def test_figures_are_json_for_every_chart_of_the_page(page: str) -> None:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert found is not None
    figures = json.loads(found.group(1))
    charts = re.findall(r'<div class="chart" id="(\w+)"', page)
    assert sorted(charts) == sorted(figures) == ["memory", "timeline", "times"]
    buttons = re.findall(r'data-chart="(\w+)" data-view="([^"]+)"', page)
    assert set(buttons) == {(chart, view) for chart in ("times", "memory") for view in figures[chart]}


def test_the_first_screen_says_what_was_asked_and_found(page: str) -> None:
    head = re.sub(r"<[^>]+>", " ", page[page.index("<header>") : page.index("</header>")])
    said = [
        "16 x NVIDIA H100",
        "4,096 tokens",
        "micro_batch = 1",
        "1,234 plans",
        "The fastest plan that fits is tp 4, pp 2",
        "first tensor degree at which the complete predicted time gets worse",
        "tp 16:",
        "times as long",
    ]
    assert [words for words in said if words not in head] == []


def test_a_report_without_a_plan_that_fits_says_so() -> None:
    page = _build("a model", fits=False)
    assert "No plan fits" in page
    assert 'class="verdict bad"' in page


def test_phones_are_told_the_width(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page


def test_a_report_without_refusals_or_other_degrees_is_a_page_too() -> None:
    report = replace(build_report(), refused=(), degrees=(), worse_same=None, worse_best=None)
    page = build_page(report, build_layer_charts(report.best), LIBRARY)
    assert "why other plans cannot be" not in page
    assert "Ranked plans" in page
