"""Tables that read well in a terminal of any width, in a pipe, and without colour.

`rich` would draw them too, but its import and rendering take a third of the half second in which explain has to answer.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from textwrap import wrap

import click

from plait.contract.step import Messages, Move
from plait.sharding import Split
from plait.units import format_bytes

NOTHING = "-"

_RULE = "\u2500"


@dataclass(frozen=True)
class Heading:
    """A line that stands out where there is colour."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells, of one or more lines, under a head and a rule; columns named in `right` hold numbers.

    Where there is not enough room, `narrow` is shown instead if there is one, else the widest columns are wrapped.
    """

    columns: Sequence[str]
    right: Sequence[str] = ()
    gap: int = 2
    narrow: "Table | None" = None
    rows: list[Sequence[str]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add a row; cells may be missing at its end."""
        self.rows.append(cells)


Part = str | Heading | Table


def print_all(parts: Iterable[Part]) -> None:
    """Print to stdout, in lines no wider than the terminal; a pipe has no width."""
    is_terminal = sys.stdout.isatty()
    room = shutil.get_terminal_size().columns if is_terminal else None
    is_bold = is_terminal and "NO_COLOR" not in os.environ
    for part in parts:
        match part:
            case Table():
                head, *lines = _lay_out(part, room)
                click.echo(_emphasize(head, is_bold))
            case Heading(text):
                click.echo(_emphasize(text, is_bold))
                lines = []
            case str():
                lines = [part] if room is None else wrap(part, room) or [""]
        for line in lines:
            click.echo(line)


def _emphasize(text: str, is_bold: bool) -> str:
    return click.style(text, bold=True) if is_bold else text


def _lay_out(table: Table, room: int | None) -> list[str]:
    """The head in one text of possibly several lines, then the rule and the rows."""
    rows = [[cell.split("\n") for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(len(line) for cell in column for line in cell) for column in zip_longest(*rows, fillvalue=[])]
    gaps = table.gap * (len(widths) - 1)
    if room is not None and sum(widths) + gaps > room:
        if table.narrow is not None:
            return _lay_out(table.narrow, room)
        widths = _squeeze(rows, widths, room - gaps)
        rows = [[_wrap(cell, width) for cell, width in zip(row, widths, strict=False)] for row in rows]
    head, *body = (_pad_row(row, widths, table) for row in rows)
    return ["\n".join(head), _rule() * (sum(widths) + gaps), *(line for row in body for line in row)]


def _pad_row(row: Sequence[Sequence[str]], widths: Sequence[int], table: Table) -> list[str]:
    """The lines of a row, cells side by side."""
    pads = [str.rjust if name in table.right else str.ljust for name in table.columns]
    lines = zip_longest(*row, fillvalue="")
    padded = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=False)] for line in lines]
    return [(" " * table.gap).join(cells).rstrip() for cells in padded]


def _squeeze(rows: Sequence[Sequence[Sequence[str]]], widths: Sequence[int], room: int) -> list[int]:
    """Take what is too much from the widest columns, as far as their longest words allow."""
    squeezed = list(widths)
    words = [
        max((len(word) for cell in column for line in cell for word in line.split()), default=0)
        for column in zip_longest(*rows, fillvalue=[])
    ]
    while sum(squeezed) > room and squeezed != words:
        widest = max(range(len(words)), key=lambda column: (squeezed[column] > words[column], squeezed[column]))
        squeezed[widest] -= 1
    return squeezed


def _wrap(cell: Sequence[str], width: int) -> list[str]:
    return [part for line in cell for part in wrap(line, max(1, width), break_long_words=False) or [""]]


def _rule() -> str:
    encoding = sys.stdout.encoding or "ascii"
    return _RULE if _RULE.encode(encoding, "ignore") else "-"


def format_moves(moves: Iterable[Move | Messages]) -> str:
    """`all_gather x, reduce_scatter dx`."""
    return ", ".join(f"{move.act} {move.tensor}" for move in moves) or NOTHING


def format_payloads(moves: Iterable[Move | Messages]) -> str:
    """`3 x 67.1 MB`: what each collective or message carries."""
    sizes = groupby(format_bytes(payload) for move in moves for payload in move.payloads)
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
