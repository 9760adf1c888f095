"""What was found, for a reader: a ranked table that fits 80 columns, and in sentences what follows."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from plait.planner.plan import PlanReport, Refusal
from plait.planner.prediction import Memory, Prediction, Verdict
from plait.planner.report.words import (
    describe_asked,
    describe_memory,
    describe_mfu,
    describe_plan,
    describe_settings,
    list_first_worse,
)
from plait.units import format_bytes, format_seconds, format_si

_COLUMNS = ("tp", "cp", "pp", "dp", "mb", "time", "interval", "MFU", "tokens/s", "memory")

_HOW = "how"

_MOST_REFUSED = 6


def build_tables(report: PlanReport, width: int) -> RenderableType:
    """The ranked table, the best plan in words, the first worse tensor degree, and what is refused."""
    return Group(
        Text(describe_asked(report)),
        Text(),
        *_list_ranking(report, width),
        Text(f"MFU: {describe_mfu(report.best)}", style="dim"),
        Text(),
        *_list_best(report),
        Text(),
        Text("First tensor degree at which the complete predicted time gets worse"),
        *(_indent(f"{question}: {answer}") for question, answer in list_first_worse(report)),
        *_list_refused(report.refused),
    )


def _list_ranking(report: PlanReport, width: int) -> Iterator[RenderableType]:
    """As much of the table as there is room for: how a plan is run goes beneath it, then the interval goes."""
    plans = report.ranked or (report.best,)
    rows = [dict(zip(_COLUMNS, _list_cells(plan), strict=True)) for plan in plans]
    hows = [_describe_how(plan) for plan in plans]
    full, lean = (_align(rows, columns) for columns in (_COLUMNS, [name for name in _COLUMNS if name != "interval"]))
    if len(full[0]) + max(map(len, (_HOW, *hows))) <= width:
        yield Text(f"{full[0]}{_HOW}" if any(hows) else full[0], style="bold")
        yield from (_keep(f"{line}{how}") for line, how in zip(full[1:], hows, strict=True))
        return
    lines = full if len(full[0].rstrip()) <= width else lean
    yield _keep(lines[0], style="bold")
    for line, how in zip(lines[1:], hows, strict=True):
        yield _keep(line)
        yield from [Padding(Text(how), (0, 0, 0, 4), expand=False)] if how else []


def _align(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    """Lines of one width, the head first; only the last column stands to the left."""
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in columns]
    lines = [dict(zip(columns, columns, strict=True)), *rows]
    return [
        "".join(
            f"{line[name]:{'<' if name == columns[-1] else '>'}{room}}  "
            for name, room in zip(columns, widths, strict=True)
        )
        for line in lines
    ]


def _keep(line: str, style: str = "") -> Text:
    """A line that is never cut."""
    return Text(line.rstrip(), style=style, no_wrap=True, overflow="ignore")


def _list_cells(prediction: Prediction) -> list[str]:
    plan = prediction.plan
    low_s, high_s = prediction.interval_s
    chunks = f" x{plan.interleave}" if plan.interleave > 1 else ""
    return [
        str(plan.tp), str(plan.cp), f"{plan.pp}{chunks}", str(plan.dp), str(plan.micro_batch),
        format_seconds(prediction.step_s), _format_interval(low_s, high_s), f"{prediction.mfu:.1%}",
        format_si(prediction.tokens_per_s, ""), format_verdict(prediction.memory),
    ]  # fmt: skip


def _format_interval(low_s: float, high_s: float) -> str:
    """`12.9-15.3`, both in the unit of the time beside it as far as that is one."""
    low, high = format_seconds(low_s), format_seconds(high_s)
    number, _, unit = low.rpartition(" ")
    return f"{number}-{high}" if high.endswith(f" {unit}") and " " not in number else f"{low}-{high}"


def format_verdict(memory: Memory) -> str:
    """`fits +20.1 GB`, `tight +1.2 GB`, `lacks 3.4 GB`."""
    if memory.verdict is Verdict.DOES_NOT_FIT:
        return f"lacks {format_bytes(-memory.margin_bytes)}"
    return f"{memory.verdict} +{format_bytes(memory.margin_bytes)}"


def _describe_how(prediction: Prediction) -> str:
    plan = prediction.plan
    words = [
        "" if plan.sequence_parallel or plan.tp == 1 else "no sp",
        "zero bubble" if plan.schedule == "zero_bubble" else "",
        plan.context_method if plan.cp > 1 and plan.context_method != "ring" else "",
        "" if plan.recompute == "none" else f"{plan.recompute} recompute",
        f"{plan.sharded}/{plan.sharding_degree}" if plan.sharding_degree > 1 else "",
        "" if plan.overlap.policy == "auto" else f"overlap {plan.overlap.policy}",
        "" if plan.quantization == "none" else plan.quantization,
    ]
    return ", ".join(filter(None, words))


def _list_best(report: PlanReport) -> Iterator[RenderableType]:
    best = report.best
    low_s, high_s = best.interval_s
    name = "Fastest" if report.ranked else "None fits; nearest"
    yield Text(f"{name}: {describe_plan(best.plan)}")
    yield _indent(describe_settings(best.plan))
    yield _indent(
        f"{format_seconds(best.step_s)} a step, {format_seconds(low_s)} to {format_seconds(high_s)}; "
        f"{format_si(best.tokens_per_s, '')} tokens/s, {format_si(best.tokens_per_s_per_device, '')} per device"
    )
    yield _indent(describe_memory(best))
    yield _indent(f"What binds is {best.binding.term}: {best.binding.reason}")
    for weak in best.weak:
        yield _indent(f"Weak: {weak}")


def _list_refused(refused: Sequence[Refusal]) -> Iterator[RenderableType]:
    """Those of one cause together, the first reason for all."""
    lines = [*_list_axes(refused), *_list_large(refused), *_list_indivisible(refused)]
    if not lines:
        return
    yield Text()
    yield Text("Refused")
    for line in lines[:_MOST_REFUSED]:
        yield _indent(line)
    if len(lines) > _MOST_REFUSED:
        yield _indent(f"and {len(lines) - _MOST_REFUSED} more, which --json lists")


def _list_axes(refused: Sequence[Refusal]) -> Iterator[str]:
    groups: dict[str, list[Refusal]] = {}
    for each in refused:
        if each.degrees is None:
            groups.setdefault(each.what.partition(" ")[0], []).append(each)
    for axis, same in groups.items():
        degrees = ", ".join(each.what.rpartition(" ")[2] for each in same)
        yield f"{axis} = {degrees}: {same[0].reason}"


def _list_large(refused: Sequence[Refusal]) -> Iterator[str]:
    groups: dict[int, list[Refusal]] = {}
    for each in refused:
        if each.degrees is not None and each.lacking_bytes:
            groups.setdefault(each.degrees.tp, []).append(each)
    for tp, same in groups.items():
        pps = ", ".join(map(str, sorted({each.degrees.pp for each in same if each.degrees})))
        least = min(each.lacking_bytes for each in same)
        yield f"tp = {tp} with pp = {pps}: does not fit; the leanest of {len(same)} lacks {format_bytes(least)}"


def _list_indivisible(refused: Sequence[Refusal]) -> Iterator[str]:
    same = [each for each in refused if each.degrees is not None and not each.lacking_bytes]
    if same:
        yield f"{len(same)} choices of tp, cp and pp: {same[0].what} {same[0].reason}"


def _indent(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2), expand=False)
