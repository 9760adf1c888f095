"""Tables of `rich` for a terminal, or for a pipe: without colour and without blanks at the ends of lines."""

import os
import sys
from collections.abc import Callable

import click
from rich.console import Console, RenderableType

_COLUMNS = 120
"""Of a pipe, unless COLUMNS says how many."""


def print_tables(build: Callable[[int], RenderableType]) -> None:
    """Print what `build` makes of the number of columns that there are."""
    if sys.stdout.isatty():
        console = Console(highlight=False)
        console.print(build(console.width))
        return
    given = os.environ.get("COLUMNS", "")
    width = int(given) if given.isdecimal() and int(given) else _COLUMNS
    console = Console(width=width, highlight=False, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(build(width))
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
