"""`plait bench planner`: predictions beside what was measured."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plait.cli.arguments import json_option
from plait.cli.console import print_tables
from plait.planner.score.report import Report, SourceScore, score_rows
from plait.planner.score.row import load_rows


@click.command("planner")
@click.option("--rows", "path", type=Path, required=True, help="Measured rows, a JSON object a line")
@json_option
def command(path: Path, as_json: bool) -> None:
    """Score predictions against measured rows, per source and kind.

    Rows that constants were fitted to are apart from those that test them. Beside each score is the null model's: one
    constant for all rows of the source, the best there is. Rows that the planner does not cover are counted by reason.
    """
    report = score_rows(load_rows(path))
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        print_tables(lambda _: Group(*_list_parts(report)))


def _list_parts(report: Report) -> Iterator[RenderableType]:
    for title, scores in (("Test rows", report.test_sources), ("Fitted rows", report.fit_sources)):
        if scores:
            yield Text(title, style="bold")
            yield _build_table(scores)
            yield Text()
    covered = sum(row.covered for row in report.rows)
    yield Text(f"{covered} of {len(report.rows)} rows are covered")
    reasons = Counter(row.reason for row in report.rows if not row.covered)
    for reason, count in reasons.items():
        yield Padding(Text(f"{count} {'row' if count == 1 else 'rows'}: {reason}"), (0, 0, 0, 2), expand=False)
    if reasons:
        yield Text("--json lists every row with its prediction, or the reason why there is none")


def _build_table(scores: Sequence[SourceScore]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("source", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for name in ("rows", "MAPE", "bias", "max", "null max"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in scores:
        table.add_row(
            each.source, each.kind, str(each.n),
            f"{each.mape:.1%}", f"{each.bias:+.1%}", f"{each.max:.1%}", f"{each.null_max:.1%}",
        )  # fmt: skip
    return table
