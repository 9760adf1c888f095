"""Where the constants of this machine are kept, and how measured rates become a catalog file."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plait.overlap.machine.cache import cache_folder

Pieces = tuple[tuple[float, float], ...]
"""Latency-bandwidth lines: seconds, and bytes a second out of each rank."""

CALIBRATED = "measured on this machine by plait bench calibrate"
"""The source of all its constants."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What a machine was measured to do.

    Attributes:
        title: the machine in words.
        date: of the measurement, `2026-11-30`.
        num_multiprocessors: of a CPU, the cores a rank computes with.
        gemm_flops_per_s: per number format, the rate of a large GEMM, which then counts as the peak.
        bytes_per_s: read and written by a kernel that streams.
        lines: per kind of collective (`all_gather`, `reduce_scatter`, `all_reduce`) and degree.
    """

    title: str
    date: str
    num_multiprocessors: int
    capacity_bytes: int
    gemm_flops_per_s: Mapping[str, float]
    gemm_launch_s: float
    bytes_per_s: float
    kernel_launch_s: float
    lines: Mapping[str, Mapping[int, Pieces]] = field(default_factory=dict)


def measured_path() -> Path:
    """The file that `plait bench calibrate` writes and `--hardware measured` reads, one for each machine."""
    machine = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node()) or "machine"
    return cache_folder() / f"hardware-{machine}.toml"


def save_measured(path: Path, rates: MeasuredRates, *, based_on: str) -> None:
    """Write a catalog file of what was measured; what was not is that of the entry it is `based_on`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_measured(rates, based_on=based_on), encoding="utf-8")


def format_measured(rates: MeasuredRates, *, based_on: str) -> str:
    """The text of that file."""
    title = re.sub(r'["\\\x00-\x1f\x7f]', " ", rates.title)
    lines = [
        f'title = "{title}"',
        f'based_on = "{based_on}"',
        f'num_multiprocessors = {{ value = {rates.num_multiprocessors}, source = "here" }}',
        _table("sources"),
        f'here = {{ text = "{CALIBRATED}", date = "{rates.date}", provenance = "measured", confidence = "high" }}',
        _table("memory", source="here"),
        f'capacity = "{rates.capacity_bytes} B"',
        f'bandwidth = "{rates.bytes_per_s:.6g} B/s"',
        "efficiency = 1.0",
        f'launch = "{rates.kernel_launch_s:.6g} s"',
        _table("peak", source="here"),
        *(f'{dtype} = "{rate:.6g} FLOP/s"' for dtype, rate in rates.gemm_flops_per_s.items()),
    ]
    for dtype in rates.gemm_flops_per_s:
        lines += [
            _table(f"gemm.{dtype}", source="here"),
            *("efficiency = 1.0", 'prologue = "0 elements"', "wave_weight = 0.0", "memory_efficiency = 1.0"),
            f'launch = "{rates.gemm_launch_s:.6g} s"',
        ]
    for kind, degrees in rates.lines.items():
        lines.append(_table(f"collectives.{kind}", source="here"))
        lines += [f"{degree} = {{ pieces = {_format_pieces(pieces)} }}" for degree, pieces in degrees.items()]
    return "\n".join(lines) + "\n"


def _table(name: str, *, source: str | None = None) -> str:
    return f"\n[{name}]" if source is None else f'\n[{name}]\nsource = "{source}"'


def _format_pieces(pieces: Pieces) -> str:
    return "[" + ", ".join(f'["{latency_s:.6g} s", "{rate:.6g} B/s"]' for latency_s, rate in pieces) + "]"
