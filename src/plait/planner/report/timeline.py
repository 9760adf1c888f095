"""One layer's timeline to zoom into: serial above overlapped, computing and moving on lanes of their own."""

from collections.abc import Sequence
from html import escape
from typing import Any

from plait.planner.cost import Kind
from plait.planner.report.figure import Figure, build_mark, build_marker, choose_time_unit
from plait.planner.report.palette import TIME, WAITING, Ink
from plait.planner.timeline import LayerChart
from plait.schedule.chart import Bar, Chart
from plait.units import format_seconds

_INKS: dict[str, Ink] = {
    **dict.fromkeys(("forward", "dgrad", "wgrad"), TIME[Kind.GEMM]),
    "attention": TIME[Kind.ATTENTION],
    **dict.fromkeys(("memory_bound", "add", "other"), TIME[Kind.MEMORY_BOUND]),
    **dict.fromkeys(("gather", "reduce", "collective", "communication"), TIME[Kind.COMMUNICATION]),
    "wait": WAITING,
}
"""The kinds of bars, in the colours that their time has on the other charts."""

_LANES = {"compute": "compute", "recv": "communication"}
"""A rank computes with what it receives, and what it sends another receives."""


def build_timeline(layers: Sequence[LayerChart]) -> Figure:
    """What one rank does, the first chart on top; `layout.meta` has the ranges that buttons show."""
    longest_s = max(layer.seconds for layer in layers)
    charts = [layer.chart for layer in layers]
    scale_s, unit = choose_time_unit(longest_s)
    lanes = [(chart, track, f"{chart.title}<br>{label}") for chart in charts for track, label in _LANES.items()]
    bars = [(bar, chart, lane) for chart, track, lane in lanes for bar in chart.bars if bar.track == track]
    inks = {id(ink): ink for ink in _INKS.values()}
    traces = [
        _build_trace(ink, [each for each in bars if _INKS.get(each[0].kind) is ink], scale_s) for ink in inks.values()
    ]
    edges = [
        _build_edge(place, edge_s / scale_s, dash)
        for place, layer in enumerate(layers)
        for edge_s, dash in ((layer.backward_s, "dash"), (layer.seconds, "dot"))
    ]
    marks = [
        build_mark(layers[0].backward_s / scale_s, 1.0, words, yref="paper", xanchor=anchor, xshift=shift)
        for words, anchor, shift in (("forward", "right", -6), ("backward", "left", 6))
    ]
    first_s, last_s = (choose(layer.backward_s for layer in layers) / scale_s for choose in (min, max))
    layout = {
        "barmode": "overlay", "bargap": 0.12, "showlegend": False, "hovermode": "closest", "dragmode": "zoom",
        "margin": {"l": 104, "r": 12, "t": 26, "b": 46}, "uniformtext": {"minsize": 9, "mode": "hide"},
        "xaxis": {"title": {"text": f"time [{unit}]"}, "range": [0, longest_s / scale_s * 1.01]},
        "yaxis": {
            "type": "category", "categoryorder": "array", "categoryarray": [lane for _, _, lane in lanes],
            "autorange": "reversed", "fixedrange": True, "showgrid": False,
        },
        "shapes": edges, "annotations": marks,
        "meta": {"forward": [0, last_s], "backward": [first_s, longest_s / scale_s]},
    }  # fmt: skip
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


def _build_edge(place: int, x: float, dash: str) -> dict[str, Any]:
    """Where backward begins, or where a chart ends, over its two lanes."""
    line = {"dash": dash, "width": 1.5, "color": "#808080"}
    return {"type": "line", "x0": x, "x1": x, "y0": 2 * place - 0.5, "y1": 2 * place + 1.5, "line": line}


def _build_trace(ink: Ink, bars: Sequence[tuple[Bar, Chart, str]], scale_s: float) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": ink.label, "marker": build_marker(ink),
        "y": [lane for _, _, lane in bars],
        "base": [bar.start_s / scale_s for bar, _, _ in bars],
        "x": [(bar.end_s - bar.start_s) / scale_s for bar, _, _ in bars],
        "text": [escape(_shorten(bar.name)) for bar, _, _ in bars],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "hoverinfo": "text", "hovertext": [_tell(bar, chart, ink) for bar, chart, _ in bars],
    }  # fmt: skip


def _shorten(name: str) -> str:
    """`mlp.w_down: dgrad [4096, 4096] @ ...` -> `dgrad`: what may find room in a bar."""
    return name.rpartition(": ")[2].partition(" [")[0]


def _tell(bar: Bar, chart: Chart, ink: Ink) -> str:
    return (
        f"<b>{format_seconds(bar.end_s - bar.start_s)}</b> {escape(bar.name)}<br>{ink.label} ({escape(bar.kind)}), "
        f"{escape(chart.title)}<br>from {format_seconds(bar.start_s)} to {format_seconds(bar.end_s)}"
    )
