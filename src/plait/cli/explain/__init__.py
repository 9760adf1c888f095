"""`plait explain`: what each rank holds, computes and sends, read off the contracts, without torch."""

from importlib import import_module

import click


class _ExplainGroup(click.Group):
    """`plait explain MODEL` beside `plait explain linear MxKxN`; only what is called is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of `--help`."""
        return ["model", "linear"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"plait.cli.explain.{cmd_name}").command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take everything but a subcommand or a call for help as the arguments of `model`."""
        if args and args[0] not in (*self.list_commands(ctx), *ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


@click.group("explain", cls=_ExplainGroup, subcommand_metavar="MODEL | linear MxKxN", no_args_is_help=False)
def command() -> None:
    """Print what each rank holds, computes and sends.

    plait explain MODEL --tp 4 explains a model: a TOML file, a preset (see plait models) or a Hugging Face config.

    plait explain linear 8192x8192x32768 --degrees 1,2,4,8 explains one linear at several degrees.
    """
