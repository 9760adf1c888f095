"""Time against tp degree, stacked by kind: for one layer, the best plan with another tp, and the best plan of each."""

from dataclasses import dataclass
from html import escape
from typing import Any

from plait.planner.cost import Cost
from plait.planner.plan import PlanReport, Worse
from plait.planner.prediction import Prediction, Verdict
from plait.planner.report.figure import (
    Figure,
    build_layout,
    build_mark,
    build_stack,
    choose_gap,
    choose_time_unit,
    tell_parts,
)
from plait.planner.report.palette import GROUPS, TIME
from plait.planner.report.words import describe_plan
from plait.units import format_seconds


@dataclass(frozen=True, slots=True)
class _Bar:
    """One degree's time, with a few words on what it is the time of, and below it."""

    tp: int
    cost: Cost
    words: tuple[str, ...]
    remark: str = ""


def build_time_views(report: PlanReport) -> dict[str, Figure]:
    """A figure for each question, by what its button says."""
    layer = [_Bar(each.tp, each.layer, ("forward and backward of one block",)) for each in report.degrees if each.layer]
    same = [_build_bar(each.tp, each.same) for each in report.degrees if each.same]
    best = [_build_bar(each.tp, each.best) for each in report.degrees if each.best]
    views = {
        "Best plan of each tp": _build_figure(best, report.worse_best, "time of a step"),
        "Best plan, only tp changed": _build_figure(same, report.worse_same, "time of a step"),
        "One layer": _build_figure(layer, report.worse_layer, "time of a layer"),
    }
    return {name: figure for name, figure in views.items() if figure["data"]}


def _build_bar(tp: int, prediction: Prediction) -> _Bar:
    words = (
        describe_plan(prediction.plan),
        f"MFU {prediction.mfu:.1%}, {prediction.tokens_per_s:,.0f} tokens/s",
        f"memory of the worst rank: {prediction.memory.verdict}",
    )
    return _Bar(
        tp, prediction.step, words, "" if prediction.memory.verdict is Verdict.FITS else prediction.memory.verdict
    )


def _build_figure(bars: list[_Bar], worse: Worse | None, title: str) -> Figure:
    if not bars:
        return {"data": [], "layout": {}}
    scale_s, unit = choose_time_unit(max(bar.cost.seconds for bar in bars))
    xs = [str(bar.tp) for bar in bars]
    summed = [(bar, bar.cost.sum_by_kind()) for bar in bars]
    stacks = [
        build_stack(
            ink,
            xs,
            [total[kind] / scale_s for _, total in summed],
            [_tell(bar, ink.label) for bar in bars],
        )
        for _, kinds in GROUPS
        for kind in kinds
        if any(total[kind] for _, total in summed)
        for ink in (TIME[kind],)
    ]  # fmt: skip
    marks = [_build_total(place, bar, scale_s, worse) for place, bar in enumerate(bars)]
    top = max(bar.cost.high_s for bar in bars) / scale_s
    layout = build_layout("tensor degree (tp)", f"{title} [{unit}]", annotations=marks)
    layout["bargap"] = choose_gap(len(bars))
    layout["yaxis"]["range"] = [0, top * 1.22]
    return {"data": [*stacks, _build_interval(bars, xs, scale_s)], "layout": layout}


def _tell(bar: _Bar, chosen: str) -> str:
    cost, sums = bar.cost, bar.cost.sum_by_kind()
    parts = [
        (TIME[kind].label, format_seconds(sums[kind]), sums[kind] / cost.seconds)
        for _, kinds in GROUPS
        for kind in kinds
        if sums[kind]
    ]
    title = f"tp {bar.tp}: {format_seconds(cost.seconds)}"
    interval = f"between {format_seconds(cost.low_s)} and {format_seconds(cost.high_s)}"
    return tell_parts(title, parts, chosen, [interval, *bar.words])


def _build_total(place: int, bar: _Bar, scale_s: float, worse: Worse | None) -> dict[str, Any]:
    lines = [f"<b>{format_seconds(bar.cost.seconds)}</b>"]
    if worse is not None and worse.tp == bar.tp:
        lines.insert(0, f"<b>{worse.factor:.2f} x</b>, first worse")
    if bar.remark:
        lines.append(escape(bar.remark))
    return build_mark(place, bar.cost.high_s / scale_s, "<br>".join(lines))


def _build_interval(bars: list[_Bar], xs: list[str], scale_s: float) -> dict[str, Any]:
    """How sure the totals are."""
    return {
        "type": "scatter", "mode": "markers", "name": "interval", "x": xs,
        "y": [bar.cost.seconds / scale_s for bar in bars],
        "marker": {"size": 5, "color": "#808080"},
        "error_y": {
            "type": "data", "symmetric": False, "thickness": 1.2, "width": 5, "color": "#808080",
            "array": [(bar.cost.high_s - bar.cost.seconds) / scale_s for bar in bars],
            "arrayminus": [(bar.cost.seconds - bar.cost.low_s) / scale_s for bar in bars],
        },
        "hoverinfo": "text",
        "hovertext": [_tell(bar, "") for bar in bars],
    }  # fmt: skip
