"""The sections of the page, each with its heading, a sentence on how to read it, and its charts or tables."""

from collections.abc import Mapping, Sequence
from html import escape

from plait.planner.cost import COMPUTE, Kind
from plait.planner.plan import PlanReport
from plait.planner.report import ownership, tables, words
from plait.planner.report.figure import Figure
from plait.planner.report.palette import GROUPS, MEMORY, TIME, WAITING, Ink
from plait.planner.report.tree import build_tree
from plait.planner.timeline import LayerChart
from plait.units import format_bytes, format_seconds

Views = Mapping[str, Figure]
"""Figures of one chart, by what the button of each says."""


def build_head(report: PlanReport) -> str:
    """What was asked and found, in words and four numbers."""
    best = report.best
    low_s, high_s = best.interval_s
    facts = [
        ("time of a step", format_seconds(best.step_s), f"{format_seconds(low_s)} to {format_seconds(high_s)}"),
        ("MFU", f"{best.mfu:.1%}", words.describe_mfu(best)),
        ("throughput", f"{best.tokens_per_s:,.0f}", f"tokens/s; {best.tokens_per_s_per_device:,.0f} a device"),
        ("memory", format_bytes(best.memory.total_bytes), f"of {format_bytes(best.memory.capacity_bytes)}: "
         f"{best.memory.verdict}"),
    ]  # fmt: skip
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><small>{escape(more)}</small></div>"
        for name, value, more in facts
    )
    worse = "".join(f"<li><b>{escape(what)}:</b> {escape(said)}.</li>" for what, said in words.list_first_worse(report))
    weak = "".join(f"<li>{escape(each)}</li>" for each in best.weak)
    warning = f'<p class="weak">Less sure than the interval says:</p><ul class="weak">{weak}</ul>' if weak else ""
    missing = ", ".join(map(str, best.plan.list_missing()))
    runs = f'<p class="weak">plait train does not run yet: {escape(missing)}.</p>' if missing else ""
    return f"""<header>
<h1>{escape(report.name)} on {report.cluster.num_devices:,} x {escape(report.cluster.hardware.title)}</h1>
<p class="asked">{escape(words.describe_asked(report))}</p>
<p class="verdict {"good" if report.ranked else "bad"}">{escape(words.describe_verdict(report))}</p>
<p>The plan: {escape(words.describe_plan(best.plan))}; {escape(words.describe_settings(best.plan))}.</p>
<dl class="facts">{cards}</dl>
<h2>The first tensor degree at which the complete predicted time gets worse</h2>
<ul>{worse}</ul>
{warning}{runs}
</header>"""


def _build_section(name: str, heading: str, said: str, inner: str) -> str:
    return f'<section id="{name}-section"><h2>{escape(heading)}</h2><p>{escape(said)}</p>{inner}</section>'


def _build_chart(name: str, views: Views, label: str) -> str:
    """Buttons for the views where there are several, and the place for the chart."""
    buttons = "".join(
        f'<button type="button" data-chart="{name}" data-view="{escape(view)}" aria-pressed="{str(not place).lower()}">'
        f"{escape(view)}</button>"
        for place, view in enumerate(views)
    )
    bar = f'<div class="views" role="group">{buttons}</div>' if len(views) > 1 else ""
    return f'{bar}<div class="chart" id="{name}" role="img" aria-label="{escape(label)}"></div>'


def _build_legend(groups: Sequence[tuple[str, Sequence[Ink]]]) -> str:
    return '<div class="legend">' + "".join(
        f'<span class="group">{f"<b>{escape(name)}</b>" if name and name.lower() != inks[0].label else ""}'
        + "".join(
            f'<span title="{escape(ink.meaning)}"><i{" class=hatched" if ink.pattern else ""} '
            f'style="background-color:{ink.color}"></i>{escape(ink.label)}</span>'
            for ink in inks
        )
        + "</span>"
        for name, inks in groups
    ) + "</div>"  # fmt: skip


def build_times(report: PlanReport, views: Views) -> str:
    """Time against tp degree."""
    said = (
        "Of the worst rank. Communication counts as far as nothing is computed beneath it. The thin line on each bar "
        "is the interval in which the time lies if constants are as uncertain as they are said to be."
    )
    legend = _build_legend([(group, [TIME[kind] for kind in kinds]) for group, kinds in GROUPS])
    missing = [each for each in report.degrees if each.reason]
    listed = "".join(f"<li>tp {each.tp}: {escape(each.reason)}</li>" for each in missing)
    inner = legend + _build_chart("times", views, "time against tensor degree")
    return _build_section("times", "Time against tensor degree", said, inner + (f"<ul>{listed}</ul>" if listed else ""))


def build_memory(views: Views) -> str:
    """Memory of ranks and degrees."""
    said = "Bytes of one device at the peak of a step. Ranks that need the same share a bar."
    legend = _build_legend([("", list(MEMORY.values()))])
    chart = _build_chart("memory", views, "memory by rank and by tensor degree")
    return _build_section("memory", "Memory of a rank", said, legend + chart)


def build_timeline(layers: Sequence[LayerChart]) -> str:
    """One layer."""
    durations = " and ".join(f"{format_seconds(layer.seconds)} {layer.chart.title}" for layer in layers)
    said = (
        f"What tp rank 0 of the best plan does in one layer, forward and then backward: {durations}. "
        "Drag over a part to zoom into it, or use the buttons; hover or tap for names and times."
    )
    names = (
        ("whole", "Whole"),
        ("forward", "Forward"),
        ("backward", "Backward"),
        ("in", "Zoom in"),
        ("out", "Zoom out"),
        ("left", "Earlier"),
        ("right", "Later"),
    )
    buttons = "".join(f'<button type="button" data-zoom="{do}">{name}</button>' for do, name in names)
    legend = _build_legend([("", [*(TIME[kind] for kind in (*COMPUTE, Kind.COMMUNICATION)), WAITING])])
    chart = '<div class="chart" id="timeline" role="img" aria-label="timeline of one layer"></div>'
    inner = f'{legend}<div class="views" role="group">{buttons}</div>{chart}'
    return _build_section("timeline", "One layer, serial and overlapped", said, inner)


def build_breakdown(report: PlanReport) -> str:
    """The tree of costs."""
    said = "Every part of the best plan's step, to unfold; the share is of the step, of all the times that it happens."
    return _build_section("breakdown", "Where the time of a step goes", said, build_tree(report.best))


def build_ownership(report: PlanReport) -> str:
    """Weights and activations."""
    best, degree = report.best, report.best.plan.tp
    said = (
        "Rows go down, columns to the right; a longer side is drawn longer, but not to scale. Colours and numbers are "
        "tp ranks; hatched is what several ranks hold. Press a rank to see what it owns, or a part to see which it is."
    )
    inner = (
        f"{ownership.draw_legend(degree)}<p class=owner aria-live=polite>&nbsp;</p><h3>Weights</h3>"
        f"{ownership.draw_all(ownership.list_weights(best), degree)}<h3>Activations of one micro-batch</h3>"
        f"{ownership.draw_all(ownership.list_activations(best), degree)}"
    )
    return _build_section("ownership", f"Who owns what at tp {degree}", said, inner)


def build_plans(report: PlanReport) -> str:
    """Ranked and refused ones."""
    inner = tables.build_ranked_table(report)
    if report.refused:
        table = tables.build_refused_table(report.refused)
        inner += f"<details><summary>{len(report.refused)} reasons why other plans cannot be</summary>{table}</details>"
    said = "Plans that fit, the fastest first." if report.ranked else "No plan fits; this one lacks least."
    return _build_section("plans", "Ranked plans", said, inner)


def build_provenance(report: PlanReport) -> str:
    """Constants."""
    said = (
        f"Every constant that the best plan's prediction depends on ({report.cluster.hardware.where} and plait's own)."
    )
    table = (
        f"<details><summary>Show the constants</summary>{tables.build_constants_table(report.best.constants)}</details>"
    )
    return _build_section("provenance", "Where the numbers come from", said, table)
