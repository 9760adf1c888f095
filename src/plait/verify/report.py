"""What `plait verify` found, as data, as a table and as JSON."""

import re
from collections import defaultdict
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.overlap.receipt import Receipt, build_receipt_table
from plait.verify.static.budget import ErrorBudget
from plait.verify.static.trace import TraceDifference

_NOTE = (
    "error: sharded against fp64, worst element; reordering: the same for the unsharded model, sums in another order"
)


@dataclass(frozen=True)
class TensorError:
    """How far one tensor is from that of the unsharded fp64 twin, relative to the typical size of the tensor.

    Attributes:
        quantity: `logits`, `loss`, `gradient`, `gradient norm` or `update` (the parameter after a step).
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
class TraceCheck:
    """What one rank issued, against what was promised: collectives by its contract, messages by its schedules."""

    rank: int
    num_promised: int
    difference: TraceDifference | str | None = None
    what: Literal["collectives", "messages"] = "collectives"

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

    @property
    def rows(self) -> list[Row]:
        """The errors by quantity and family of parameters, the worst tensor of each standing for all."""
        families: dict[str, list[TensorError]] = defaultdict(list)
        for error in self.errors:
            families[_family(error)].append(error)
        rows = []
        for what, errors in families.items():
            worst = max(errors, key=_badness)
            rows.append(Row(what, len(errors), worst, worst.error <= self.budget.value))
        return rows

    @property
    def failures(self) -> list[str]:
        """One line for everything that does not hold."""
        budget = self.budget.value
        lines = [f"{row.what}: {row.worst.name} is off by {row.worst.error:.1e}" for row in self.rows if not row.passed]
        lines = [f"{line}, budget {budget:.1e}" for line in lines]
        lines += [f"{check.what}: {_differing(check)}" for check in self.exact if not check.passed]
        return lines + [
            f"{trace.what} of rank {trace.rank}: {trace.difference}" for trace in self.traces if not trace.passed
        ]

    @property
    def passed(self) -> bool:
        """Whether all holds."""
        return bool(self.errors and self.traces) and not self.failures

    @property
    def verdict(self) -> str:
        """One line."""
        mode = "with" if self.subject["sequence_parallel"] else "without"
        who = f"{self.subject['model']} at tp={self.subject['tp']} {mode} sequence parallelism"
        num_checks = len(self.rows) + len(self.exact) + len(self.traces)
        if self.passed:
            return f"PASS: {who} equals its unsharded fp64 twin ({num_checks} of {num_checks} checks)"
        return f"FAIL: {who} is not its unsharded fp64 twin ({len(self.failures)} of {num_checks} checks fail)"

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
                    "num_promised": trace.num_promised,
                    "difference": None if trace.difference is None else str(trace.difference),
                    "passed": trace.passed,
                }
                for trace in self.traces
            ],
            "receipt": self.receipt.to_json(),
        }


def build_table(report: Report) -> RenderableType:
    """The report for a reader."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("worst tensor", overflow="fold")
    for heading in ("error", "budget", "reordering"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in report.rows:
        numbers = (row.worst.error, report.budget.value, row.worst.reordering_error)
        table.add_row(row.what, row.worst.name, *(f"{number:.1e}" for number in numbers), _mark(row.passed))
    for check in report.exact:
        what = f"{check.num_compared} tensors, bit for bit"
        table.add_row(check.what, what, "0" if check.passed else "differs", "0", "", _mark(check.passed))
    for trace in report.traces:
        what = f"{trace.num_promised} promised, in order"
        found = "equal" if trace.passed else "differs"
        table.add_row(f"{trace.what} of rank {trace.rank}", what, found, "", "", _mark(trace.passed))
    notes = (str(report.budget), _NOTE)
    parts: list[RenderableType] = [table, "", *(Text(note, style="dim") for note in notes)]
    if report.subject.get("overlap", "disabled") != "disabled":
        parts += ["", build_receipt_table(report.receipt)]
    parts += [Text(f"  {line}", style="red") for line in report.failures]
    return Group(*parts, "", Text(report.verdict, style="bold green" if report.passed else "bold red"))


def _describe_error(error: TensorError, budget: float) -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite is null."""
    numbers = {
        name: value if isfinite(value) else None for name, value in vars(error).items() if name.endswith("error")
    }
    return vars(error) | numbers | {"passed": error.error <= budget}


def _badness(error: TensorError) -> float:
    return inf if isnan(error.error) else error.error


def _mark(passed: bool) -> Text:
    return Text("pass", style="green") if passed else Text("FAIL", style="bold red")


def _differing(check: ExactCheck) -> str:
    if not check.num_compared:
        return "nothing was compared"
    shown = "; ".join(check.differing[:3])
    return shown + (f"; and {len(check.differing) - 3} more" if len(check.differing) > 3 else "")


def _family(error: TensorError) -> str:
    """`gradient` of `layers.3.attention.wq.weight` -> `gradient of layers.*.attention`."""
    if error.quantity == error.name:
        return error.quantity
    module = re.sub(r"(?<![^.])\d+(?![^.])", "*", error.name.rpartition(".")[0])
    return f"{error.quantity} of {'.'.join(module.split('.')[:3])}"
