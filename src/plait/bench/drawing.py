"""Charts as a picture: one above the other on one time axis, two lanes a rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.schedule.chart import Bar, Chart
from plait.units import format_seconds

COLORS = {
    "forward": "#2f6db3",
    "dgrad": "#5b9bd5",
    "wgrad": "#9dc3e6",
    "add": "#1b3a5c",
    "other": "#d0d0d0",
    "gather": "#e07b39",
    "reduce": "#c0392b",
    "collective": "#e07b39",
    "wait": "#f2c7a5",
}
"""Computing in blue, moving in red and orange."""

LEGEND = {
    "forward": "forward GEMM",
    "dgrad": "dgrad GEMM",
    "wgrad": "wgrad GEMM",
    "add": "sum of addends",
    "other": "other local work",
    "gather": "rows that are gathered",
    "reduce": "addends that are summed",
    "collective": "library's collective",
    "wait": "waiting for a rank",
}

LANES = {"compute": "compute", "recv": "communication"}
"""What is drawn: a rank computes with what it receives, and what it sends another receives."""

FORMATS = (".svg", ".png", ".pdf")
_LANE_INCHES = 0.34
_WIDTH_INCHES = 11.0
_HEAD_INCHES = 1.5
_BAR = 0.82
_GAP = 0.9
"""Between two charts, in lanes."""


def check_can_draw(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn afterwards.

    Raises:
        ConfigError: another kind of file, or no matplotlib.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: a timeline can be a {', '.join(FORMATS)} file", hint=f"{path.stem}.svg")
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a timeline needs matplotlib, which is not installed", hint="pip install 'plait[bench]'"
        ) from error


def save_timeline(charts: Sequence[Chart], path: Path) -> None:
    """Draw the charts, the first on top."""
    # Only here: nobody who draws nothing has to have it.
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    num_lanes = sum(len(LANES) * chart.num_ranks for chart in charts) + _GAP * len(charts)
    figure = Figure((_WIDTH_INCHES, _HEAD_INCHES + _LANE_INCHES * num_lanes), layout="constrained")
    axes = figure.subplots()
    longest_s = max(chart.duration_s for chart in charts)
    y, labels = 0.0, []
    for chart in charts:
        axes.text(0, y + 0.25, f"{chart.title}: {format_seconds(chart.duration_s)}", weight="bold", va="bottom")
        y -= _GAP - 0.4
        for rank in range(chart.num_ranks):
            for track, label in LANES.items():
                bars = [bar for bar in chart.bars if bar.rank == rank and bar.track == track]
                _draw_lane(axes, bars, y)
                labels.append((y, f"rank {rank} {label}"))
                y -= 1
        axes.plot(
            [chart.duration_s] * 2, [y + 0.5, y + len(LANES) * chart.num_ranks + 0.5], color="black", lw=1, ls=":"
        )
        y -= _GAP - 0.4
    axes.set_yticks([place for place, _ in labels], [text for _, text in labels])
    axes.set_ylim(y + 0.4, 1.2)
    axes.set_xlim(0, longest_s * 1.01)
    axes.xaxis.set_major_formatter(lambda value, _: format_seconds(value) if value else "0")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _draw_legend(figure, charts)
    # Text stays text, so the file is small, and equal runs give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "plait"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_lane(axes: Any, bars: Sequence[Bar], y: float) -> None:
    axes.axhspan(y - _BAR / 2, y + _BAR / 2, color="#f5f5f5", lw=0)
    for kind in dict.fromkeys(bar.kind for bar in bars):
        spans = [(bar.start_s, bar.end_s - bar.start_s) for bar in bars if bar.kind == kind]
        axes.broken_barh(spans, (y - _BAR / 2, _BAR), facecolor=COLORS[kind], edgecolor="white", linewidth=0.4)


def _draw_legend(figure: Any, charts: Sequence[Chart]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    drawn = {bar.kind for chart in charts for bar in chart.bars if bar.track in LANES}
    patches = [Patch(facecolor=COLORS[kind], label=text) for kind, text in LEGEND.items() if kind in drawn]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
