"""Memory stacked by what it is for: of the ranks of the best plan, and of the worst rank at each tp degree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.planner.plan import PlanReport
from plait.planner.prediction import MemoryPart, Prediction
from plait.planner.report.figure import Figure, build_layout, build_mark, build_stack, choose_gap, tell_parts
from plait.planner.report.palette import MEMORY
from plait.planner.report.ranks import RankMemory, list_rank_memory
from plait.units import format_bytes

_GB = 1e9
_MOST_SUMS = 8
"""Bars beneath which there is room for their sum."""


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    parts: Mapping[MemoryPart, float]
    what: str

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())


def build_memory_views(report: PlanReport) -> dict[str, Figure]:
    """A figure for each question, by what its button says."""
    capacity_bytes = report.best.memory.capacity_bytes
    ranks = [_build_rank_bar(each, report.best) for each in list_rank_memory(report.best)]
    best = [_build_degree_bar(each.best) for each in report.degrees if each.best]
    same = [_build_degree_bar(each.same) for each in report.degrees if each.same]
    views = {"Ranks of the best plan": _build_figure(ranks, capacity_bytes, "ranks that need the same")}
    degrees = {"Best plan of each tp": best, "Best plan, only tp changed": same}
    return views | {
        name: _build_figure(bars, capacity_bytes, "tensor degree (tp), worst rank")
        for name, bars in degrees.items()
        if bars
    }


def _build_rank_bar(rank: RankMemory, prediction: Prediction) -> _Bar:
    plan = prediction.plan
    tp = f"tp {rank.first}" if rank.first == rank.last else f"tp {rank.first}-{rank.last}"
    stage = f"stage {rank.stage}" if plan.pp > 1 else ""
    short = str(rank.stage) if plan.pp > 1 else ""
    is_uneven = (rank.first, rank.last) != (0, plan.tp - 1)
    label = ", ".join(filter(None, [f"pp {short}" if short else "", tp if is_uneven or not short else ""]))
    return _Bar(label, rank.parts, ", ".join(filter(None, [stage, tp, f"each of {plan.dp * plan.cp} over dp and cp"])))


def _build_degree_bar(prediction: Prediction) -> _Bar:
    memory = prediction.memory
    return _Bar(str(prediction.plan.tp), dict(memory.parts), f"worst rank, stage {memory.stage}: {memory.verdict}")


def _build_figure(bars: Sequence[_Bar], capacity_bytes: float, title: str) -> Figure:
    xs = [bar.label for bar in bars]
    stacks = [
        build_stack(ink, xs, [bar.parts.get(part, 0.0) / _GB for bar in bars], [_tell(bar, part) for bar in bars])
        for part, ink in MEMORY.items()
        if any(bar.parts.get(part) for bar in bars)
    ]
    highest = max(capacity_bytes, *(bar.total_bytes for bar in bars)) / _GB
    capacity = capacity_bytes / _GB
    words = f"a device has {format_bytes(capacity_bytes)} (dashed)"
    mark = build_mark(1, 1, words, xref="paper", yref="paper", xanchor="right")
    line = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": capacity, "y1": capacity,
        "line": {"dash": "dash", "width": 1.5, "color": "#808080"},
    }  # fmt: skip
    layout = build_layout(title, "memory [GB]", annotations=[mark], shapes=[line])
    if len(bars) <= _MOST_SUMS:
        sums = [f"{bar.label}<br><b>{bar.total_bytes / _GB:.3g} GB</b>" for bar in bars]
        layout["xaxis"] |= {"tickmode": "array", "tickvals": list(range(len(bars))), "ticktext": sums}
    layout["bargap"] = choose_gap(len(bars))
    layout["yaxis"]["range"] = [0, highest * 1.04]
    return {"data": stacks, "layout": layout}


def _tell(bar: _Bar, chosen: MemoryPart) -> str:
    total = bar.total_bytes
    parts = [
        (ink.label, format_bytes(bar.parts[part]), bar.parts[part] / total)
        for part, ink in MEMORY.items()
        if bar.parts.get(part)
    ]
    return tell_parts(format_bytes(total), parts, MEMORY[chosen].label, [bar.what, MEMORY[chosen].meaning])
