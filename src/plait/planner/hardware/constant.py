"""A constant of a catalog: its value, and why anyone should believe it."""

import re
from dataclasses import dataclass
from enum import StrEnum
from math import isinf, isnan

SCALES: dict[str, dict[str, float]] = {
    "FLOP/s": {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "B/s": {"B/s": 1.0, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12},
    "B": {"B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "elements": {"elements": 1.0},
    "tokens": {"tokens": 1.0},
    "devices": {"devices": 1.0},
    "1": {"": 1.0},
}
"""Units by the base unit that they are multiples of."""

_UNBOUNDED = ("B/s", "FLOP/s")
"""Units of rates: an infinite one takes no time, and asks what a limit costs."""

_QUANTITY = re.compile(r"\s*([+-]?(?:inf|[0-9][0-9_.]*(?:[eE][+-]?[0-9]+)?))\s*(\S*)\s*")


class Provenance(StrEnum):
    """Where a value comes from, from the surest to the least sure."""

    DATASHEET = "datasheet"
    MEASURED = "measured"
    FITTED = "fitted"
    ASSUMED = "assumed"


USUAL_ERROR: dict[Provenance, float] = {
    Provenance.DATASHEET: 0.02,
    Provenance.MEASURED: 0.05,
    Provenance.FITTED: 0.10,
    Provenance.ASSUMED: 0.25,
}
"""How far a prediction is off for one constant, as a share of it, where no fitted error is stated."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value in SI base units, and where it comes from.

    Attributes:
        name: the key in the catalog file: `gemm.bfloat16.efficiency`.
        unit: `B/s`, `FLOP/s`, `B`, `s`, `elements`, `tokens`, `devices`, or `1` for a ratio or a count.
        date: when it was measured, or read where it is published.
        error: mean error of predictions against what it was fitted to, held-out half, as a share.
        low: the smallest value seen; `high` is the largest.
    """

    name: str
    value: float
    unit: str
    provenance: Provenance
    source: str
    date: str
    confidence: str
    error: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def uncertainty(self) -> float:
        """By what share predictions are off because of it: what the fit left over, never less than its kind allows."""
        usual = USUAL_ERROR[self.provenance]
        if self.error is None:
            return usual
        return max(self.error, usual) if self.provenance is Provenance.ASSUMED else self.error


def parse_quantity(text: object, unit: str) -> float | str:
    """`"312 TFLOP/s"` as a number in `unit`, or in words what is wrong with it; ratios are plain numbers."""
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        return f"should be {_describe(unit)}, not {text!r}"
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return f"should be {_describe(unit)}, not {text!r}"
    number, given = match.groups()
    scale = SCALES[unit].get(given)
    if scale is None:
        return (
            f'should be {_describe(unit)}, not {text!r}: "{given}" is another unit'
            if given
            else (f"should be {_describe(unit)}: the unit is missing from {text!r}")
        )
    try:
        value = float(number) * scale
    except ValueError:
        return f"should be {_describe(unit)}, not {text!r}"
    if isinf(value) and unit not in _UNBOUNDED:
        return f"should be a finite number, not {text!r}"
    return "is not a number" if isnan(value) else value


def _describe(unit: str) -> str:
    scales = [name for name in SCALES[unit] if name]
    return f"a number and one of {', '.join(scales)}" if scales else "a plain number"
