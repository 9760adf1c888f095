"""`plait explain`: what each rank holds, computes and sends, read off the contracts, without torch."""

import click

from plait.cli.explain.linear import command as linear_command
from plait.cli.explain.model import command as model_command


class _ExplainGroup(click.Group):
    """`plait explain MODEL` beside `plait explain linear MxKxN`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take everything but a subcommand or a call for help as the arguments of `model`."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


@click.group("explain", cls=_ExplainGroup, subcommand_metavar="MODEL | linear MxKxN", no_args_is_help=False)
def command() -> None:
    """Print what each rank holds, computes and sends.

    plait explain MODEL --tp 4 explains a model: a TOML file, a preset (see plait models) or a Hugging Face config.

    plait explain linear 8192x8192x32768 --degrees 1,2,4,8 explains one linear at several degrees.
    """


command.add_command(linear_command)
command.add_command(model_command)
