"""Measured rows: one JSON object a line, as in `benchmarks/published.jsonl`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import ConfigError

_REQUIRED = ("id", "source", "kind", "value", "unit")


_MOST = 10**15
"""Of a count: bytes are the largest."""

_LARGEST = 1e100
"""Of a value, so that ratios and their sums are numbers too."""


class NotCovered(Exception):
    """Why a row has no prediction; it is reported, never raised to the user."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement, and what is said about how it was made; everything but the value may be missing."""

    id: str
    source: str
    kind: str
    value: float
    unit: str
    gpu: str | None = None
    num_devices: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    precision: str = ""
    notes: str = ""
    measure: str | None = None

    @property
    def text(self) -> str:
        """Everything that is said in words, in lower case."""
        return f"{self.source} {self.notes} {self.parallel.get('recompute') or ''}".lower()

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of `parallel`.

        Raises:
            NotCovered: it is neither there nor has a default.
        """
        return _count(self.parallel, "parallel", name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of `model`, as `count`."""
        return _count(self.model, "model", name, default)


def _count(table: Mapping[str, Any], where: str, name: str, default: int | None) -> int:
    value = table.get(name)
    if value is None:
        if default is None:
            raise NotCovered(f"{where}.{name} is not given")
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1 <= value <= _MOST or value != int(value):
        raise NotCovered(f"{where}.{name} is {value!r}, not a whole number from 1 to {_MOST:.0e}")
    return int(value)


def load_rows(path: Path) -> list[Row]:
    """All rows of a file.

    Raises:
        ConfigError: a file that cannot be read, or lines that are no rows, all of them named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="rows are JSON objects, one a line") from error
    rows, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(parse_row(json.loads(line)))
            except (ValueError, RecursionError) as error:  # also of brackets too deep
                problems.append(f"line {number}: {error}")
    if problems:
        raise ConfigError.from_problems(str(path), problems[:20], hint=f"each row has {', '.join(_REQUIRED)}")
    return rows


def parse_row(record: object) -> Row:
    """One row.

    Raises:
        ValueError: it lacks what every row has.
    """
    if not isinstance(record, dict):
        raise ValueError(f"should be an object, not {type(record).__name__}")
    if missing := [name for name in _REQUIRED if record.get(name) is None]:
        raise ValueError(f"has no {', '.join(missing)}")
    value = record["value"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / _LARGEST <= value <= _LARGEST:
        raise ValueError(f"value is {str(value)[:40]}, not a positive number")
    hardware = _as_table(record.get("hardware"))
    count = hardware.get("count")
    return Row(
        str(record["id"]), str(record["source"]), str(record["kind"]), float(value), str(record["unit"]),
        gpu=None if hardware.get("gpu") is None else str(hardware["gpu"]),
        num_devices=count if isinstance(count, int) and count > 0 else None,
        model=_as_table(record.get("model")),
        parallel=_as_table(record.get("parallel")),
        precision=str(record.get("precision") or ""),
        notes=str(record.get("notes") or ""),
        measure=record.get("measure"),
    )  # fmt: skip


def _as_table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
