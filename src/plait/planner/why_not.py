"""Why a plan was not chosen: it cannot be, does not fit, or is slower, by how much and in which term."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.planner.plan import PlanReport, with_settings
from plait.planner.prediction import Prediction
from plait.planner.space.fixed import SEARCHED, Fixed, check_fixed, describe_fixed, parse_fixed
from plait.planner.tensor_degree import compare_terms
from plait.units import format_bytes, format_seconds

_AT_ALL = 0.001
"""A difference of less than this share of the step is none."""

_OF_TP = {"sequence_parallel", "overlap"}
"""What a plan without a tp group decides for nothing."""

_FORMATS = dict.fromkeys(("quantization", "precision", "gradient_dtype"), "number formats")
"""What is not searched, in words where there are some."""


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
    return WhyNot(name, f"{name} {_compare(other, best, settings, terms)}", other, terms)


def _compare(other: Prediction, best: Prediction, settings: Fixed, terms: tuple[tuple[str, float], ...]) -> str:
    if all(getattr(best.plan, key) == value for key, value in settings.items()):
        return "is what was chosen"
    longer = other.step_s / best.step_s - 1
    if abs(longer) <= _AT_ALL:
        is_idle = settings.keys() <= _OF_TP and other.plan.tp == best.plan.tp == 1
        return "makes no difference at tp 1" if is_idle else "is as fast as what was chosen"
    times = f"{format_seconds(other.step_s)} instead of {format_seconds(best.step_s)} a step"
    if longer > 0:
        term, term_s = terms[0]
        return f"is slower: {times}, {longer:.1%} more; {term} grows most, by {format_seconds(term_s)}"
    unsearched = {key: value for key, value in settings.items() if key not in SEARCHED}
    names = " and ".join(dict.fromkeys(_FORMATS.get(key, key) for key in unsearched))
    fix = ",".join(describe_fixed({key: value}).replace(" ", "") for key, value in unsearched.items())
    note = f"; {names} are not searched: --fix {fix}" if unsearched else ""
    return f"is faster: {times}, {-longer:.1%} less{note}"
