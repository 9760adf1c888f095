"""`plait bench`: how fast it is here, against the limit; and how good predictions are."""

from importlib import import_module

import click

_SUMMARIES = {
    "calibrate": "Measure this machine for plait plan --hardware measured",
    "overlap": "Compare a part of a model overlapped with the same exposed",
    "planner": "Score predictions against measured rows",
}


class _BenchGroup(click.Group):
    """Only what is called is imported: scoring the planner needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of `--help`."""
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in _SUMMARIES:
            return None
        command: click.Command = import_module(f"plait.cli.bench.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the summaries without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))


@click.group("bench", cls=_BenchGroup)
def command() -> None:
    """Measure on this machine, in interleaved rounds, and score the planner."""
