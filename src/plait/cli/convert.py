"""`plait convert`: between Hugging Face directories and checkpoints of ours."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from plait.checkpoint.shards import parse_file_bytes
from plait.hf.convert.run import DTYPES, Form, Request, StartProgress, convert
from plait.sharding import MAX_TP


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument("target", type=click.Path(path_type=Path), metavar="DST")
@click.option(
    "--to",
    "form",
    type=click.Choice(["hf", "plait", "native"]),
    help="A Hugging Face directory, a checkpoint of plait, or one of plait's own Llama or GPT-2 family "
    "[default: plait for a directory, hf for a checkpoint]",
)
@click.option(
    "--tp", type=click.IntRange(1, MAX_TP), default=1, show_default=True, help="Ranks a checkpoint of plait is cut for"
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Number format of the weights [default: that of SRC]")
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Of a file in a Hugging Face directory: 500MB, 2GiB"
)
@click.option("--merge", is_flag=True, help="Of a checkpoint of adapters: write the model with them in its weights")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is at DST already")
def command(
    source: Path,
    target: Path,
    form: Form | None,
    tp: int,
    dtype: str | None,
    max_shard_size: str,
    merge: bool,
    overwrite: bool,
) -> None:
    """Convert SRC, a Hugging Face directory or a checkpoint of plait, and write it to DST.

    Whole tensors, true sizes and the same bits, whatever the degrees were, unless --dtype asks for another number
    format. Config, tokenizer and chat template go along. One tensor is in memory at a time. DST appears complete or not
    at all. A checkpoint of adapters becomes a directory of peft, or with --merge one of the model. What was written
    goes to stdout as JSON.
    """
    request = Request(
        source,
        target,
        form,
        tp,
        None if dtype is None else DTYPES[dtype],
        parse_file_bytes(max_shard_size),
        overwrite,
        is_merged=merge,
    )
    with _show_progress(source.name) as start:
        result = convert(request, start)
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(json.dumps(result.to_json(), indent=2))


@contextmanager
def _show_progress(name: str) -> Iterator[StartProgress]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda total: lambda size_bytes: None
        return
    columns = (name, BarColumn(), DownloadColumn(), TimeRemainingColumn(), "left")
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def start(total: int) -> Callable[[int], None]:
            task = bar.add_task(name, total=total)
            return lambda size_bytes: bar.advance(task, size_bytes)

        yield start
