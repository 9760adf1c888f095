import re
from dataclasses import replace

from plait.planner.report.tables import build_constants_table, build_ranked_table, build_refused_table
from tests.support.planned_report import EVIL, build_report


def _cells(table: str, row: int) -> list[tuple[str, str]]:
    body = re.search(r"<tbody>(.*)</tbody>", table)
    assert body is not None
    return re.findall(r'<td[^>]* data-sort="([^"]*)">([^<]*)</td>', body.group(1).split("</tr>")[row])


def _heads(table: str) -> list[str]:
    return re.findall(r'<button type="button">([^<]*)</button>', table)


def test_ranked_plans_are_in_order_and_sorted_by_numbers_not_words() -> None:
    report = build_report()
    table = build_ranked_table(report)
    step = _heads(table).index("step")
    assert table.count("<tr>") == 1 + len(report.ranked)
    for row, prediction in enumerate(report.ranked):
        assert _cells(table, row)[0] == (str(row + 1), str(row + 1))
        assert float(_cells(table, row)[step][0]) == prediction.step_s
    assert {"tp", "pp", "dp", "MFU", "tokens/s", "memory", "verdict", "binds"} < set(_heads(table))


def test_what_all_plans_have_in_common_is_said_once() -> None:
    table = build_ranked_table(build_report())
    assert "recompute none" in table[: table.index("<table")]
    assert "recompute" not in _heads(table)
    assert "dp shards" in _heads(table)


def test_where_nothing_fits_the_nearest_is_shown() -> None:
    assert build_ranked_table(build_report(fits=False)).count("<tr>") == 2


def test_reasons_are_text() -> None:
    table = build_refused_table(build_report().refused)
    assert "&lt;script&gt;" in table
    assert "<script" not in table
    assert _cells(table, 1)[2] == ("4", "4")


def test_every_constant_is_there_once_with_where_it_comes_from() -> None:
    best = build_report().best
    table = build_constants_table((*best.constants, best.constants[0]))
    names = [_cells(table, row)[0][1] for row in range(table.count("<tr>") - 1)]
    assert sorted(names) == sorted({constant.name for constant in best.constants})
    assert _heads(table) == ["constant", "value", "seen", "uncertainty", "provenance", "confidence", "source", "date"]
    assert {_cells(table, row)[4][1] for row in range(len(names))} <= {"datasheet", "measured", "fitted", "assumed"}


def test_sources_are_text() -> None:
    best = build_report().best
    assert "<script" not in build_constants_table([replace(best.constants[0], source=EVIL)])
