"""Charts as a trace that Perfetto and chrome://tracing open: a process for each rank, a thread for each track."""

from collections.abc import Sequence
from typing import Any

from plait.schedule.chart import TRACKS, BarTrack, Chart

TRACK_NAMES: dict[BarTrack, str] = {
    "compute": "compute",
    "send": "communication (sent)",
    "recv": "communication (received)",
}
"""Sent and received messages overlap each other, as a link carries both directions at once."""

_US = 1e6


def build_trace(charts: Sequence[Chart]) -> dict[str, Any]:
    """All charts in one trace, each from time 0, so that they can be laid one above the other."""
    events: list[dict[str, Any]] = []
    first = 0
    for chart in charts:
        for rank in range(chart.num_ranks):
            events += _list_names(first + rank, f"{chart.title}: rank {rank}")
        events += [
            {
                "ph": "X", "name": bar.name, "cat": bar.kind, "pid": first + bar.rank, "tid": TRACKS.index(bar.track),
                "ts": bar.start_s * _US, "dur": (bar.end_s - bar.start_s) * _US,
            }
            for bar in chart.bars
        ]  # fmt: skip
        first += chart.num_ranks
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _list_names(process: int, name: str) -> list[dict[str, Any]]:
    named = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}]
    named.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
    for number, track in enumerate(TRACKS):
        where = {"ph": "M", "pid": process, "tid": number}
        named.append({**where, "name": "thread_name", "args": {"name": TRACK_NAMES[track]}})
        named.append({**where, "name": "thread_sort_index", "args": {"sort_index": number}})
    return named
