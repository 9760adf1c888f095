"""Figures as plotly reads them: plain dictionaries, so that equal plans give equal pages."""

from collections.abc import Sequence
from html import escape
from typing import Any

from plait.planner.report.palette import Ink

Figure = dict[str, Any]
"""`data` and `layout`; colours of text and lines are the page's, which knows whether it is dark."""

_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def choose_time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds in a unit, and its name, so that the axis has numbers from 1 to 1000."""
    return next(((scale, name) for scale, name in _SCALES if longest_s >= scale), _SCALES[-1])


def build_marker(ink: Ink) -> dict[str, Any]:
    """A bar's colour and hatching."""
    marker: dict[str, Any] = {"color": ink.color, "line": {"width": 0.5, "color": "rgba(0,0,0,0.35)"}}
    if ink.pattern:
        hatching = {"shape": ink.pattern, "bgcolor": ink.color, "fgcolor": "#FFFFFF", "size": 7, "solidity": 0.3}
        marker["pattern"] = hatching
    return marker


def build_stack(ink: Ink, xs: Sequence[str], ys: Sequence[float], hovers: Sequence[str]) -> dict[str, Any]:
    """One kind's bars, to be stacked on those before."""
    return {
        "type": "bar", "name": ink.label, "x": list(xs), "y": list(ys), "marker": build_marker(ink),
        "hovertext": list(hovers), "hoverinfo": "text",
    }  # fmt: skip


def build_layout(x_title: str, y_title: str, **more: Any) -> dict[str, Any]:
    """What all stacked charts have."""
    return {
        "barmode": "stack", "bargap": 0.35, "showlegend": False, "hovermode": "closest", "dragmode": False,
        "margin": {"l": 56, "r": 12, "t": 34, "b": 52},
        "xaxis": {"type": "category", "title": {"text": escape(x_title)}, "fixedrange": True},
        "yaxis": {"title": {"text": escape(y_title)}, "rangemode": "tozero", "fixedrange": True},
        **more,
    }  # fmt: skip


def tell_parts(title: str, parts: Sequence[tuple[str, str, float]], chosen: str, words: Sequence[str] = ()) -> str:
    """A bar as a hover tells it: all its parts, so that thin ones are found too, with the one pointed at in bold.

    `parts` are label, size in words and share, from bottom to top; listed as they are stacked, so from top to bottom.
    """
    lines = [
        f"<b>{line}</b>" if label == chosen else line
        for label, size, share in reversed(parts)
        for line in (f"{escape(label)}: {escape(size)}, {share:.1%}",)
    ]
    return "<br>".join([f"<b>{escape(title)}</b>", *lines, *map(escape, words)])


def choose_gap(num_bars: int) -> float:
    """Between bars, as a share: few bars are not to look like walls."""
    return max(0.35, 0.85 - 0.12 * num_bars)


def build_mark(x: float, y: float, text: str, **more: Any) -> dict[str, Any]:
    """Words above the bar in that place, counted from 0; `text` is escaped already."""
    return {"x": x, "y": y, "text": text, "showarrow": False, "yanchor": "bottom", "font": {"size": 12}, **more}
