"""The command group: commands are imported when called, and errors become one message and an exit status."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from plait import __version__
from plait.errors import ConfigError, PlaitError, describe_nearest

_SUMMARIES = {
    "bench": "Measure on this machine, against the limit",
    "convert": "Hugging Face directories to checkpoints and back",
    "explain": "What each rank holds, computes and sends",
    "generate": "Continue prompts with a Hugging Face model",
    "models": "List the models known by name",
    "plan": "Predict time and memory of every plan, and rank them",
    "serve": "Answer HTTP requests in OpenAI's forms",
    "train": "Train a model, or resume its training",
    "verify": "Compare a sharded model with the unsharded one",
}
"""The commands, each the `command` of `plait.cli.NAME`; their help is here so that `--help` imports none of them."""

_EXTRAS = {
    **dict.fromkeys(("torch", "numpy", "safetensors", "tokenizers"), "torch"),
    "transformers": "hf",
    "peft": "lora",
    **dict.fromkeys(("prometheus_client", "starlette", "uvicorn"), "serve"),
}
"""By module, with which extra it is installed."""


class LazyGroup(click.Group):
    """A group whose commands are imported on first use, so that only those that need torch pay for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of `--help`."""
        return list(_SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import one command."""
        if cmd_name not in _SUMMARIES:
            raise ConfigError(f'there is no command "{cmd_name}"', hint=describe_nearest(cmd_name, _SUMMARIES))
        try:
            command: click.Command = import_module(f"plait.cli.{cmd_name}").command
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            message = f"plait {cmd_name} needs {error.name}, which is not installed"
            raise ConfigError(message, hint=f"pip install 'plait[{_EXTRAS[error.name]}]'") from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the summaries without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))


@click.group(cls=LazyGroup, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="plait", message="%(prog)s %(version)s")
def group() -> None:
    """Tensor-sequence parallelism for PyTorch."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit.

    0 all went well, 1 a verification failed, 2 something given cannot work, 3 a rank died, hung or crashed, 130
    interrupted.
    """
    if sys.stdout is None:  # closed by the shell, `>&-`: there is nobody to print for
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    try:
        status = group.main(args, prog_name="plait", standalone_mode=False)
    except PlaitError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_status)
    except click.ClickException as error:
        click.echo(f"error: {_describe_usage(error)}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        click.echo("error: what was to be printed cannot be written: the disk is full", err=True)
        sys.exit(2)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _describe_usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    return message if ctx is None else f"{message}\n\nhint: see {ctx.command_path} --help"
