"""One rank of a server: rank 0 answers HTTP beside its share of the work, the others only work."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import click
import torch

from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.generate.batch import ContinuousBatch, Limits
from plait.generate.open import build_generating_mesh, open_batch
from plait.generate.source import open_source
from plait.serve.desk import Desk
from plait.serve.form.chat import PromptReader
from plait.serve.http.address import listen, url_of
from plait.serve.http.app import Service, build_app
from plait.serve.http.thread import SETTLE_S, HttpThread
from plait.serve.metrics import Metrics
from plait.serve.options import ServeOptions
from plait.serve.rounds import Follower, Leader, make_rounds
from plait.train.stop import StopRequest

_TELL_S = 1.5
"""For clients to be told of a failure: the launcher gives a rank twice that before it ends it."""

_READING_THREADS = 8
"""That parse and tokenize, so that a short prompt does not wait for long ones."""


def serve_rank(options: ServeOptions) -> None:
    """Serve on this rank of the world until a rank is asked to stop, by SIGTERM or Ctrl-C.

    Connections are taken before the model is loaded, and told that it is being loaded. The URL goes to stdout when the
    model is up.

    Raises:
        PlaitError: on every rank: the port is taken, the model cannot be loaded, or a rank has failed.
    """
    mesh = build_generating_mesh(options.tp, getattr(torch, options.dtype))
    if mesh.rank == 0:
        _lead(options, mesh)
    else:
        _follow(options, mesh)


def _lead(options: ServeOptions, mesh: Mesh) -> None:
    metrics = Metrics()
    desk = Desk(metrics, options.max_batch + options.max_queue)
    with StopRequest(desk.wake) as stop:
        with together(mesh):
            door = _open_door(options, desk, metrics)
        with _closed_at_the_end(door, desk):
            batch = _load(options, mesh)
            max_context = min(batch.capacity.max_context, options.max_model_len or batch.capacity.max_context)
            # Places are kept for all that may come: who does not say how much gets a fair share, not the whole cache.
            share = max(1, options.max_cache_tokens // options.max_batch)
            desk.open(replace(batch.capacity, max_context=max_context, default_new_tokens=share))
            click.echo(f"{door.url}/v1")
            leader = Leader(desk, batch, metrics, options.grace_s, lambda: stop.is_made, door.http.stop_accepting)
            make_rounds(batch, leader, mesh)


def _follow(options: ServeOptions, mesh: Mesh) -> None:
    with StopRequest() as stop:
        with together(mesh):
            pass  # rank 0 opens the door
        make_rounds(_load(options, mesh), Follower(lambda: stop.is_made), mesh)


def _load(options: ServeOptions, mesh: Mesh) -> ContinuousBatch:
    dtype = getattr(torch, options.dtype)
    limits = Limits(max_requests=options.max_batch, max_cache_tokens=options.max_cache_tokens)
    return open_batch(options.folder, mesh, dtype=dtype, overlap=options.overlap, limits=limits)


@dataclass(frozen=True)
class _Door:
    """The HTTP side, up."""

    url: str
    http: HttpThread


def _open_door(options: ServeOptions, desk: Desk, metrics: Metrics) -> _Door:
    listener = listen(options.host, options.port)
    url = url_of(listener)
    # A tokenizer of its own: the one of the batch is used by another thread.
    reader = PromptReader(open_source(options.folder).tokenizer)
    threads = ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="plait-read")
    service = Service(
        options.served_name, desk, reader, metrics, threads, options.api_key, is_logged=options.log_requests
    )
    http = HttpThread(build_app(service), listener, options.grace_s, desk.lose)
    http.start()
    click.echo(f"listening at {url}, loading {options.folder}", err=True)
    return _Door(url, http)


@contextmanager
def _closed_at_the_end(door: _Door, desk: Desk) -> Iterator[None]:
    """End the HTTP side with the block: after its last answers, or with an error for all that is in flight."""
    try:
        yield
    except BaseException:
        desk.fail()
        door.http.close(_TELL_S)
        raise
    door.http.close(SETTLE_S)
