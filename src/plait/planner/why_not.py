"""Why a plan was not chosen: it cannot be, does not fit, or is slower, by how much and in which term."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.planner.plan import PlanReport, with_settings
from plait.planner.prediction import Prediction
from plait.planner.space.fixed import check_fixed, describe_fixed, parse_fixed
from plait.planner.tensor_degree import compare_terms
from plait.units import format_bytes, format_seconds

_AT_ALL = 0.001
"""A difference of less than this share of the step is none."""


@dataclass(frozen=True, slots=True)
class WhyNot:
    """An answer.

    Attributes:
        asked: `tp = 16`.
        reason: a sentence without a full stop.
        prediction: the best plan of what was asked for; None where there is none.
        terms: of a slower plan, by how many seconds each term is longer than in the best plan, most first.
    """

    asked: str
    reason: str
    prediction: Prediction | None = None
    terms: tuple[tuple[str, float], ...] = ()


def why_not(report: PlanReport, asked: str | Mapping[str, Any]) -> WhyNot:
    """Why the best plan of a report is not one with `asked`: `"tp=16"`, `"pp=4, recompute=full"` or such a mapping.

    Everything else is chosen anew, so the answer is about the best that can be had with it.

    Raises:
        ConfigError: something that a plan does not decide, or a value that it cannot have.
    """
    what = "why-not"
    settings = parse_fixed([asked], what=what) if isinstance(asked, str) else check_fixed(asked, what=what)
    name = describe_fixed(settings)
    try:
        found = with_settings(report, settings)
    except PlaitError as error:
        return WhyNot(name, f"{name} cannot be: {error.message}")
    best, other = report.best, found.best
    if not found.ranked:
        lacking = format_bytes(-other.memory.margin_bytes)
        reason = f"{name} does not fit: of all plans with it the leanest lacks {lacking} on the worst rank"
        return WhyNot(name, reason, other)
    if not report.ranked:
        return WhyNot(name, f"{name} fits, where nothing else does", other)
    terms = tuple(sorted(compare_terms(other.step, best.step).items(), key=lambda pair: -pair[1]))
    longer_s = other.step_s - best.step_s
    if longer_s <= _AT_ALL * best.step_s:
        same = "is what was chosen" if longer_s <= 0 else "is as fast as what was chosen"
        return WhyNot(name, f"{name} {same}", other, terms)
    return WhyNot(name, f"{name} is slower: {_describe(other, best, terms)}", other, terms)


def _describe(other: Prediction, best: Prediction, terms: tuple[tuple[str, float], ...]) -> str:
    term, term_s = terms[0]
    times = f"{format_seconds(other.step_s)} instead of {format_seconds(best.step_s)} a step"
    return f"{times}, {other.step_s / best.step_s - 1:.1%} more; {term} grows most, by {format_seconds(term_s)}"
