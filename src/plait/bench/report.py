"""What a comparison says: as a record for files, and as tables for a reader."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.bench.overlap import Comparison, Run
from plait.bench.rounds import Spread
from plait.units import format_seconds

_SENSIBLE = 1.25
"""Of the limit, more than noise makes of it."""


def describe_comparison(comparison: Comparison) -> dict[str, Any]:
    """Everything but the bars."""
    workload = comparison.workload
    return {
        "workload": {
            "what": workload.name,
            "tokens": workload.num_tokens,
            "width": workload.width,
            "dtype": str(workload.dtype).removeprefix("torch."),
            "quantization": workload.recipe_name,
            "sequence_parallel": workload.sequence_parallel,
        },
        "rounds": len(comparison.compute_s),
        "compute_only_s": Spread.of(comparison.compute_s).to_json(),
        "exposed": [_describe_run(run) for run in comparison.exposed],
        "best_exposed": comparison.best_exposed.variant.name,
        "overlapped": [_describe_overlapped(comparison, run) for run in comparison.overlapped],
    }


def _describe_run(run: Run) -> dict[str, Any]:
    return {
        "name": run.variant.name,
        "asked": run.variant.overlap.asked,
        "time_s": Spread.of(run.times_s).to_json(),
        "exposed_s": {"measured": run.exposed_s, "predicted": run.predicted_exposed_s},
        "receipt": run.receipt.to_json(),
    }


def _describe_overlapped(comparison: Comparison, run: Run) -> dict[str, Any]:
    return {
        **_describe_run(run),
        "gain": comparison.find_gain(run).to_json(),
        "gain_over": {each.variant.name: comparison.find_gain(run, over=each).to_json() for each in comparison.exposed},
        "over_compute_only": comparison.find_excess(run).to_json(),
        "limit": comparison.limits[comparison.overlapped.index(run)].to_json(),
        "fraction_of_ideal": comparison.find_fraction(run).to_json(),
    }


def build_report(record: Mapping[str, Any]) -> RenderableType:
    """The record for a reader."""
    workload, machine = record["workload"], record["machine"]
    best = next(run for run in record["exposed"] if run["name"] == record["best_exposed"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("time", "quarters", "times as fast (by round)", "waits", "predicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in (*record["exposed"], *record["overlapped"]):
        exposed_s = run["exposed_s"]
        gain = run.get("gain")
        table.add_row(
            run["name"], *_format_spread(run["time_s"]),
            _format_ratio(gain) if gain else "1" if run is best else "",
            format_seconds(exposed_s["measured"]),
            "" if exposed_s["predicted"] is None else format_seconds(exposed_s["predicted"]),
        )  # fmt: skip
    table.add_row("compute only", *_format_spread(record["compute_only_s"]), "", "", "")
    kernels = {line["kernel"] for run in record["overlapped"] for line in run["receipt"]["lines"]} - {None}
    recipe = f" under {workload['quantization']} ({'; '.join(sorted(kernels))})" if kernels else ""
    head = (
        f"{workload['what']}, {workload['tokens']} tokens, {workload['dtype']}{recipe}, tp {record['tp']}, "
        f"{record['rounds']} interleaved rounds; {machine['cpu']}, load {machine['load_average']:.1f} before, "
        f"{machine['date']}"
    )
    waits = Text("waits: for others, also for ranks that come late; predicted: for what moves alone", style="dim")
    limits = [Text(_describe_limit(run), style="dim") for run in record["overlapped"]]
    return Group(Text(head), table, waits, *limits)


def _describe_limit(run: Mapping[str, Any]) -> str:
    limit, reached = run["limit"], run["fraction_of_ideal"]["median"]
    share = f"of which {reached:.0%} is reached"
    if reached > _SENSIBLE:
        share = "which the run beat: at sizes or rounds so small what was measured alone says nothing"
    return (
        f"{run['name']}: communication alone takes {limit['communication_over_compute']:.2f} of the compute alone; the "
        f"larger is {format_seconds(limit['max_s'])}, with the schedule's head and tail "
        f"{format_seconds(limit['schedule_s'])}, {share}"
    )


def _format_spread(spread: Mapping[str, float]) -> tuple[str, str]:
    return format_seconds(spread["median"]), f"{format_seconds(spread['low'])} - {format_seconds(spread['high'])}"


def _format_ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} - {spread['high']:.2f})"
