"""Costs, constants and degrees as plain data for `--json`: seconds and bytes in the names."""

from typing import Any

from plait.planner.cost import Cost
from plait.planner.hardware import Constant
from plait.planner.tensor_degree import Worse

Record = dict[str, Any]


def build_cost_record(cost: Cost) -> Record:
    """A tree of costs, its leaves with the names of their constants."""
    return {
        "name": cost.name, "kind": None if cost.kind is None else str(cost.kind), "seconds": cost.seconds,
        "low_s": cost.low_s, "high_s": cost.high_s, "exposed_s": cost.exposed_s, "hidden_s": cost.hidden_s,
        "times": cost.times, "efficiency": cost.efficiency, "note": cost.note, "constants": list(cost.constants),
        "parts": [build_cost_record(part) for part in cost.parts],
    }  # fmt: skip


def build_constant_record(constant: Constant) -> Record:
    """A constant, and why anyone should believe it."""
    return {
        "name": constant.name, "value": constant.value, "unit": constant.unit, "provenance": str(constant.provenance),
        "source": constant.source, "date": constant.date, "confidence": constant.confidence, "low": constant.low,
        "high": constant.high,
    }  # fmt: skip


def build_worse_record(worse: Worse | None) -> Record | None:
    """The first degree that takes longer than the one before; null where there is none."""
    if worse is None:
        return None
    return {
        "tp": worse.tp, "before": worse.before, "seconds": worse.seconds, "before_s": worse.before_s,
        "factor": worse.factor, "term": str(worse.term), "term_s": worse.term_s,
    }  # fmt: skip
