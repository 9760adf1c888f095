"""What `plait verify` found, as data and as JSON."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite, isnan
from statistics import median
from typing import Any, Literal, TypeVar

from plait.overlap.receipt import Receipt
from plait.verify.static.budget import ErrorBudget
from plait.verify.static.trace import TraceDifference

ErrorT = TypeVar("ErrorT", "TensorError", "RecipeError")


@dataclass(frozen=True)
class TensorError:
    """How far one tensor is from that of the unsharded fp64 twin, relative to the typical size of the tensor.

    Attributes:
        quantity: `logits`, `loss`, `gradient`, `gradient norm` or `update` (the parameter after a step); in the pass
            after the first update of a history `calibrated logits` and so on.
        name: its fully qualified name.
        error: that of the sharded model.
        reordering_error: that of the unsharded model in the same precision with every sum taken in another order.
    """

    quantity: str
    name: str
    error: float
    reordering_error: float


@dataclass(frozen=True)
class ExactCheck:
    """Tensors that have to be equal bit for bit; `differing` says which are not, where and how."""

    what: str
    num_compared: int
    differing: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.num_compared > 0 and not self.differing


@dataclass(frozen=True)
class RecipeError:
    """What a precision recipe does to a tensor: its distance from the unquantized fp64 one, relative to all of that.

    It is stated and not judged: rounding to few bits is what was asked for.
    """

    quantity: str
    name: str
    error: float


@dataclass(frozen=True)
class TraceCheck:
    """What one rank issued, against what was promised: collectives by its contract, messages by its schedules."""

    rank: int
    num_promised: int
    difference: TraceDifference | str | None = None
    what: Literal["collectives", "messages", "ring messages", "transfers"] = "collectives"
    phase: str = ""

    @property
    def label(self) -> str:
        """`calibrated collectives of rank 0`."""
        return f"{self.phase} {self.what} of rank {self.rank}".strip()

    @property
    def passed(self) -> bool:
        """Whether the trace is the contract."""
        return self.difference is None


@dataclass(frozen=True)
class Row:
    """One line of the table: the worst tensor of a kind."""

    what: str
    num_tensors: int
    worst: TensorError
    passed: bool


@dataclass(frozen=True)
class RecipeRow:
    """One line of what the recipe does: the median and the worst tensor of a kind."""

    what: str
    num_tensors: int
    median: float
    worst: RecipeError


@dataclass(frozen=True)
class Report:
    """Everything one verification found."""

    subject: dict[str, str | int | bool]
    """What was verified: model, degree, mode, sizes, precision, seed."""
    budget: ErrorBudget
    errors: tuple[TensorError, ...]
    exact: tuple[ExactCheck, ...]
    traces: tuple[TraceCheck, ...]
    receipt: Receipt
    """What the first rank overlapped, and how."""
    recipe_errors: tuple[RecipeError, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """The errors by quantity and family of parameters, the worst tensor of each standing for all."""
        rows = []
        for what, errors in _group(self.errors).items():
            worst = max(errors, key=_badness)
            rows.append(Row(what, len(errors), worst, worst.error <= self.budget.value))
        return rows

    @property
    def recipe_rows(self) -> list[RecipeRow]:
        """What the recipe does, likewise."""
        return [
            RecipeRow(what, len(errors), median(error.error for error in errors), max(errors, key=_badness))
            for what, errors in _group(self.recipe_errors).items()
        ]

    @property
    def failures(self) -> list[str]:
        """One line for everything that does not hold."""
        budget = self.budget.value
        lines = [f"{row.what}: {row.worst.name} is off by {row.worst.error:.1e}" for row in self.rows if not row.passed]
        lines = [f"{line}, budget {budget:.1e}" for line in lines]
        lines += [f"{check.what}: {_differing(check)}" for check in self.exact if not check.passed]
        return lines + [f"{trace.label}: {trace.difference}" for trace in self.traces if not trace.passed]

    @property
    def passed(self) -> bool:
        """Whether all holds."""
        return bool(self.errors and self.traces) and not self.failures

    @property
    def verdict(self) -> str:
        """One line."""
        mode = "with" if self.subject["sequence_parallel"] else "without"
        who = f"{self.subject['model']} at {self.subject['mesh']} {mode} sequence parallelism"
        recipe = self.subject.get("quantization", "none")
        twin = "its unsharded fp64 twin" + ("" if recipe == "none" else f" under {recipe}")
        num_checks = len(self.rows) + len(self.exact) + len(self.traces)
        if self.passed:
            return f"PASS: {who} equals {twin} ({num_checks} of {num_checks} checks)"
        return f"FAIL: {who} is not {twin} ({len(self.failures)} of {num_checks} checks fail)"

    def to_json(self) -> dict[str, Any]:
        """Every number, for a program."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "subject": self.subject,
            "budget": {"value": self.budget.value, "formula": str(self.budget)},
            "failures": self.failures,
            "errors": [_describe_error(error, self.budget.value) for error in self.errors],
            "exact": [vars(check) | {"passed": check.passed} for check in self.exact],
            "traces": [
                {
                    "rank": trace.rank,
                    "what": trace.what,
                    "phase": trace.phase,
                    "num_promised": trace.num_promised,
                    "difference": None if trace.difference is None else str(trace.difference),
                    "passed": trace.passed,
                }
                for trace in self.traces
            ],
            "receipt": self.receipt.to_json(),
            "recipe_errors": [vars(error) | {"error": _name_number(error.error)} for error in self.recipe_errors],
        }


def _describe_error(error: TensorError, budget: float) -> dict[str, Any]:
    numbers = {name: _name_number(value) for name, value in vars(error).items() if name.endswith("error")}
    return vars(error) | numbers | {"passed": error.error <= budget}


def _name_number(value: float) -> float | None:
    """JSON has no infinity: an error that is not finite is null."""
    return value if isfinite(value) else None


def _group(errors: Iterable[ErrorT]) -> dict[str, list[ErrorT]]:
    families: dict[str, list[ErrorT]] = defaultdict(list)
    for error in errors:
        families[_family(error)].append(error)
    return families


def _badness(error: TensorError | RecipeError) -> float:
    return inf if isnan(error.error) else error.error


def _differing(check: ExactCheck) -> str:
    if not check.num_compared:
        return "nothing was compared"
    shown = "; ".join(check.differing[:3])
    return shown + (f"; and {len(check.differing) - 3} more" if len(check.differing) > 3 else "")


def _family(error: TensorError | RecipeError) -> str:
    """`gradient` of `layers.3.attention.wq.weight` -> `gradient of layers.*.attention`."""
    if error.quantity.endswith(error.name):
        return error.quantity
    module = re.sub(r"(?<![^.])\d+(?![^.])", "*", error.name.rpartition(".")[0])
    return f"{error.quantity} of {'.'.join(module.split('.')[:3])}"
