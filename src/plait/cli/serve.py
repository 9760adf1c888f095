"""`plait serve`: an HTTP server of one model, under torchrun, Slurm, or on ranks that it starts itself."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from plait.cli.arguments import dtype_option, overlap_option
from plait.comm.environment import Launch, check_world_size, detect_launch
from plait.comm.launch import LocalRanks, init_from_environment
from plait.errors import PlaitError
from plait.generate.batch import Limits
from plait.generate.open import check_model
from plait.generate.source import open_source
from plait.serve.http.address import check_address
from plait.serve.options import ServeOptions
from plait.serve.server import serve_rank
from plait.sharding import MAX_TP, MeshShape
from plait.train.stop import StopRequest

_TIMEOUT_S = 300.0
"""For a collective that not every rank joins: a rank may take longer than another to read its weights."""

_COUNT = click.IntRange(min=1)


@click.command("serve")
@click.argument("folder", metavar="DIR", type=Path)
@click.option("--tp", type=click.IntRange(1, MAX_TP), help="Tensor-parallel degree [default: 1, or the ranks started]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; others need an API key")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one, printed")
@click.option("--api-key", envvar="PLAIT_API_KEY", help="Key that clients send; better as PLAIT_API_KEY")
@click.option("--model-name", default="", help="What clients call the model [default: the name of DIR]")
@click.option("--max-batch", type=_COUNT, default=32, show_default=True, help="Sequences generated together")
@click.option("--max-queue", type=click.IntRange(0), default=256, show_default=True, help="Sequences that may wait")
@click.option(
    "--max-cache-tokens", type=_COUNT, default=Limits.max_cache_tokens, show_default=True, help="Room of the KV cache"
)
@click.option("--max-model-len", type=click.IntRange(2), help="Tokens of prompt and answer [default: the model's]")
@dtype_option
@overlap_option
@click.option(
    "--grace", "grace_s", type=click.FloatRange(0, 86_400), default=30.0, show_default=True,
    help="Seconds for what is under way, when asked to stop",
)  # fmt: skip
@click.option("--log-requests", is_flag=True, help="A line for each request to stderr, without its texts")
def command(**given: Any) -> None:
    """Answer HTTP requests in OpenAI's forms with the model in DIR, a Hugging Face directory.

    Clients use the URL that is printed when the model is up as their base URL. Many requests are generated together;
    each is answered as if it were alone. Ctrl-C or SIGTERM lets what is under way finish, and ends. Starts ranks on
    this machine, unless torchrun or Slurm has.
    """
    launch = detect_launch(os.environ)
    options = _check(launch, given)
    if launch.kind == "alone":
        _start_local(options)
    else:
        with init_from_environment(launch, _TIMEOUT_S):
            serve_rank(options)


def _check(launch: Launch, given: dict[str, Any]) -> ServeOptions:
    """Check all that each rank can check alone, before any waits for another; one rank of a host reports."""
    try:
        source = open_source(given["folder"])
        options = ServeOptions(
            **{**given, "tp": given["tp"] or launch.world_size, "dtype": given["dtype"] or source.dtype}
        )
        check_world_size(launch, MeshShape(tp=options.tp))
        if launch.rank == 0:
            check_address(options.host, options.port, options.api_key)
        check_model(options.folder, options.tp)
    except PlaitError:
        if launch.local_rank == 0:
            raise
        sys.exit(2)
    return options


def _start_local(options: ServeOptions) -> None:
    if options.tp == 1:
        serve_rank(options)
        return
    with LocalRanks(options.tp, timeout_s=_TIMEOUT_S) as ranks, StopRequest(ranks.ask_to_stop):
        ranks.call(serve_rank, options=options)
