"""Where the time of a step goes, as a tree to unfold: how long, what is hidden, how efficient, and why."""

from html import escape

from plait.planner.cost import Cost
from plait.planner.prediction import Prediction
from plait.planner.report.palette import TIME
from plait.units import format_seconds

_LEAST_SHARE = 1e-4
"""Of a step; what takes less is not worth a line."""


def build_tree(prediction: Prediction) -> str:
    """Nested folds, the outermost open; every part's time is once, its share is of all the times that it happens."""
    return f'<div class="tree">{_build_node(prediction.step, prediction.step.seconds, 1.0, depth=0)}</div>'


def _build_node(cost: Cost, step_s: float, times: float, *, depth: int) -> str:
    line = _describe(cost, step_s, times)
    if not cost.parts:
        return f'<div class="leaf">{line}</div>'
    parts = "".join(
        _build_node(part, step_s, times * cost.times, depth=depth + 1)
        for part in cost.parts
        if times * cost.times * (part.seconds + part.hidden_s) >= _LEAST_SHARE * step_s
    )
    return f"<details{' open' * (depth < 1)}><summary>{line}</summary>{parts}</details>"


def _describe(cost: Cost, step_s: float, times: float) -> str:
    share = times * cost.seconds / step_s if step_s else 0.0
    ink = f'<i style="background-color:{TIME[cost.kind].color}"></i>' if cost.kind else ""
    words = [
        f"{cost.times:g} times its parts" if cost.times != 1 else "",
        f"{format_seconds(cost.hidden_s)} more are hidden" if cost.hidden_s else "",
        f"{cost.efficiency:.0%} of the peak" if cost.efficiency is not None else "",
        cost.note,
    ]
    more = f"<small>{escape(', '.join(filter(None, words)))}</small>"
    name = escape(cost.name.replace("layers.0.", ""))
    seconds = format_seconds(cost.seconds) if cost.seconds else "0 s"
    return f"{ink}<b>{name}</b> {seconds} <span>{share:.1%}</span> {more}"
