"""What a user fixed of a plan: `tp=8`, `recompute=full`; everything else is searched."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from plait.config.axis.context import ContextMethodName
from plait.config.file.toml import load_overrides
from plait.config.overlap import OverlapConfig
from plait.config.precision import FloatFormat, PrecisionConfig
from plait.config.section import Section, list_problems
from plait.config.train import Recompute
from plait.errors import ConfigError, describe_nearest
from plait.planner.plan_config import Loss, PlannedSchedule, Quantization, Sharded

COUNTS = ("tp", "cp", "pp", "dp", "dp_replicate", "dp_shard", "interleave", "micro_batch")
_FLAGS = ("sequence_parallel", "fused_attention", "overlaps_gradients", "overlaps_sends")
_CHOICES: dict[str, tuple[str, ...]] = {
    "context_method": get_args(ContextMethodName),
    "schedule": get_args(PlannedSchedule),
    "sharded": get_args(Sharded),
    "recompute": get_args(Recompute),
    "quantization": get_args(Quantization),
    "gradient_dtype": get_args(FloatFormat),
    "loss": get_args(Loss),
}
_SECTIONS: dict[str, tuple[str, type[Section]]] = {
    "overlap": ("policy", OverlapConfig),
    "precision": ("compute", PrecisionConfig),
}
"""Keys that are sections of a run's config, and what a plain value stands for."""

_SHORT = {"sp": "sequence_parallel", "mb": "micro_batch"}

KEYS = (*COUNTS, *_FLAGS, *_CHOICES, *_SECTIONS)

SEARCHED = frozenset({*COUNTS, "sequence_parallel", "context_method", "schedule", "sharded", "recompute"})
"""What is chosen where it is not fixed; of everything else a plan has one value."""

Fixed = Mapping[str, Any]
"""Fields of a `PlanConfig`, and `dp`."""


def parse_fixed(texts: Sequence[str], *, what: str) -> dict[str, Any]:
    """`tp=8,pp=4` as values; `what` is named in errors (`--fix`).

    Raises:
        ConfigError: everything that is wrong at once.
    """
    words = [word for text in texts for word in text.replace(",", " ").split()]
    tree, problems = load_overrides(words, {name: plain for name, (plain, _) in _SECTIONS.items()})
    found = [f"{problem.key}: {problem.text}" for problem in problems]
    return check_fixed(tree, what=what, problems=[*found, *_list_contradictions(words)])


def _list_contradictions(words: Sequence[str]) -> list[str]:
    """`tp=8,tp=4`: neither is what was meant."""
    values: dict[str, list[str]] = {}
    for word in words:
        key, _, value = word.partition("=")
        values.setdefault(_SHORT.get(key, key), []).append(value)
    return [
        f"{key} is both {' and '.join(distinct)}" for key, given in values.items() if (distinct := sorted({*given}))[1:]
    ]


def check_fixed(values: Mapping[str, Any], *, what: str, problems: Sequence[str] = ()) -> dict[str, Any]:
    """Values of known keys, sections as the objects they are.

    Raises:
        ConfigError: keys that a plan does not have, or values that they cannot have; all of them.
    """
    found, checked = list(problems), {}
    for key, value in values.items():
        name = _SHORT.get(key, key)
        problem, checked[name] = _check(name, value)
        found += [f"{key} = {_show(value)}: {problem}"] if problem else []
    if found:
        raise ConfigError.from_problems(what, found)
    return checked


def describe_fixed(fixed: Fixed) -> str:
    """`tp = 8, pp = 4`."""
    return ", ".join(f"{key} = {_show(value)}" for key, value in fixed.items())


def _show(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case OverlapConfig():
            return value.asked
        case PrecisionConfig():
            return value.compute
        case _:
            return str(value)


def _check(name: str, value: Any) -> tuple[str, Any]:
    """What is wrong, or nothing, and the value."""
    if name in _SECTIONS:
        return _check_section(name, value)
    if name in COUNTS:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return "" if is_count else "should be a whole number from 1", value
    if name in _FLAGS:
        return "" if isinstance(value, bool) else "should be true or false", value
    if name in _CHOICES:
        return "" if value in _CHOICES[name] else f"should be one of {', '.join(_CHOICES[name])}", value
    return f"is nothing that a plan decides ({describe_nearest(name, (*KEYS, *_SHORT))})", value


def _check_section(name: str, value: Any) -> tuple[str, Any]:
    plain, section = _SECTIONS[name]
    if isinstance(value, section):
        return "", value
    try:
        return "", section.model_validate(dict(value) if isinstance(value, Mapping) else {plain: value})
    except ValidationError as error:
        return "; ".join(f"{problem.key}: {problem.text}" for problem in list_problems(error)), value
