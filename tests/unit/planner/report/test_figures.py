"""Charts: their numbers are the report's, and plotly knows every property that they have."""

from collections.abc import Iterator

import pytest

from plait.planner.cost import Kind
from plait.planner.plan import PlanReport
from plait.planner.report.figure import Figure, choose_time_unit
from plait.planner.report.memory import build_memory_views
from plait.planner.report.palette import TIME
from plait.planner.report.timeline import build_timeline
from plait.planner.report.times import build_time_views
from plait.planner.timeline import build_layer_charts
from tests.support.planned_report import build_report


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return build_report()


def _list_figures(report: PlanReport) -> Iterator[tuple[str, Figure]]:
    yield from build_time_views(report).items()
    yield from build_memory_views(report).items()
    yield "timeline", build_timeline(build_layer_charts(report.best))


def test_plotly_knows_every_property(report: PlanReport) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    for _, figure in _list_figures(report):
        assert len(graph_objects.Figure(figure).data) == len(figure["data"])


def test_stacks_add_up_to_the_time_of_a_step(report: PlanReport) -> None:
    figure = build_time_views(report)["Best plan of each tp"]
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    assert bars[0]["x"] == ["1", "2", "4", "8", "16"]
    scale_s, _ = choose_time_unit(max(each.best.step_s for each in report.degrees if each.best))
    expected = [each.best.step_s for each in report.degrees if each.best]
    assert [scale_s * sum(column) for column in zip(*(bar["y"] for bar in bars), strict=True)] == pytest.approx(
        expected
    )


def test_the_first_worse_degree_is_marked_where_it_is(report: PlanReport) -> None:
    worse = report.worse_best
    assert worse is not None
    marks = build_time_views(report)["Best plan of each tp"]["layout"]["annotations"]
    assert [("first worse" in mark["text"], mark["x"]) for mark in marks] == [(place == 4, place) for place in range(5)]
    assert f"{worse.factor:.2f} x" in marks[4]["text"]
    assert not any("worse" in mark["text"] for mark in build_time_views(report)["One layer"]["layout"]["annotations"])


def test_memory_of_the_worst_rank_is_the_highest_bar(report: PlanReport) -> None:
    figure = build_memory_views(report)["Ranks of the best plan"]
    totals = [sum(column) for column in zip(*(bar["y"] for bar in figure["data"]), strict=True)]
    assert figure["data"][0]["x"] == ["pp 0", "pp 1"]
    assert 1e9 * max(totals) == pytest.approx(report.best.memory.total_bytes)
    assert totals[0] != totals[1]


def test_axes_and_hovers_have_units(report: PlanReport) -> None:
    for name, figure in _list_figures(report):
        titles = [figure["layout"][axis].get("title", {}).get("text", "") for axis in ("xaxis", "yaxis")]
        assert any(title.endswith(unit) for title in titles for unit in ("[s]", "[ms]", "[us]", "[GB]")), name
        for trace in figure["data"]:
            assert all(any(unit in text for unit in ("s</b>", "B</b>")) for text in trace["hovertext"]), name


def test_a_kind_has_its_colour_on_every_chart(report: PlanReport) -> None:
    times = {trace["name"]: trace["marker"]["color"] for trace in build_time_views(report)["One layer"]["data"]}
    layer = {
        trace["name"]: trace["marker"]["color"] for trace in build_timeline(build_layer_charts(report.best))["data"]
    }
    for kind in (Kind.GEMM, Kind.ATTENTION, Kind.MEMORY_BOUND, Kind.COMMUNICATION):
        ink = TIME[kind]
        assert times[ink.label] == layer[ink.label] == ink.color


def test_time_units_keep_numbers_short() -> None:
    assert [choose_time_unit(seconds)[1] for seconds in (12.0, 1.0, 0.2, 3e-5, 1e-9)] == ["s", "s", "ms", "us", "us"]
