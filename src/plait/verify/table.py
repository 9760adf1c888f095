"""What `plait verify` found, as tables for a reader."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.overlap.receipt import build_receipt_table
from plait.verify.report import Report

_NOTE = (
    "error: sharded against fp64, worst element; reordering: the same for the unsharded model, sums in another order"
)
_RECIPE_NOTE = "sharded against the unquantized fp64 model, of a tensor as a whole: stated, not judged"


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
        table.add_row(trace.label, what, found, "", "", _mark(trace.passed))
    notes = (str(report.budget), _NOTE)
    parts: list[RenderableType] = [table, "", *(Text(note, style="dim") for note in notes)]
    if report.recipe_errors:
        parts += ["", _build_recipe_table(report), Text(_RECIPE_NOTE, style="dim")]
    if (report.subject.get("overlap", "disabled"), report.subject.get("quantization", "none")) != ("disabled", "none"):
        parts += ["", build_receipt_table(report.receipt)]
    parts += [Text(f"  {line}", style="red") for line in report.failures]
    return Group(*parts, "", Text(report.verdict, style="bold green" if report.passed else "bold red"))


def _build_recipe_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"error of {report.subject.get('quantization')}", no_wrap=True)
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("worst tensor", overflow="fold")
    for heading in ("worst", "median"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.recipe_rows:
        numbers = (f"{number:.1e}" for number in (row.worst.error, row.median))
        table.add_row(row.what, str(row.num_tensors), row.worst.name, *numbers)
    return table


def _mark(passed: bool) -> Text:
    return Text("pass", style="green") if passed else Text("FAIL", style="bold red")
