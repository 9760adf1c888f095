"""Tables that read well in a terminal of any width, in a pipe, and without colour."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import click
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from plait.contract.collective import Collective
from plait.contract.step import Move
from plait.sharding import Split
from plait.units import format_bytes

_PIPED_COLUMNS = 200
"""A pipe has no width: wide enough that no cell is wrapped."""

NOTHING = "-"


def build_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table with a rule under its head and nothing else drawn; columns named in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def build_heading(text: str) -> Text:
    """A line that stands out where there is colour."""
    return Text(text, style="bold")


def print_all(parts: Iterable[RenderableType]) -> None:
    """Print to stdout, without the blanks that fill a table up to its right edge."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_PIPED_COLUMNS)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def format_moves(moves: Iterable[Move]) -> str:
    """`all_gather x, reduce_scatter dx`."""
    return ", ".join(f"{move.collective.kind} {move.tensor}" for move in moves) or NOTHING


def format_payloads(collectives: Iterable[Collective]) -> str:
    """`3 x 67.1 MB`: what each collective carries."""
    sizes = groupby(format_bytes(collective.payload_bytes) for collective in collectives)
    counted = ((size, len(list(same))) for size, same in sizes)
    return ", ".join(f"{count} x {size}" if count > 1 else size for size, count in counted) or NOTHING


def format_owners(split: Split | None) -> str:
    """`0:8192 .. 24576:32768`: who owns which indices, in rank order; `all` where every rank owns all."""
    if split is None:
        return "all"
    shown = [str(interval) for interval in split.intervals]
    owners = " ".join(shown) if len(shown) <= 3 else f"{shown[0]} .. {shown[-1]}"
    holders = sorted({len(ranks) for ranks in split.replica_groups})
    return f"{owners}, each on {' or '.join(map(str, holders))} ranks" if split.is_replicated else owners


def format_shape(shape: Sequence[int]) -> str:
    """`[8192, 4096]`."""
    return f"[{', '.join(map(str, shape))}]"
