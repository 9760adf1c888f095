"""`plait generate`: text from a Hugging Face directory, under torchrun, Slurm, or on ranks that it starts itself."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from plait.cli.arguments import dtype_option, json_option, overlap_option
from plait.comm.environment import Launch, check_world_size, detect_launch
from plait.comm.launch import LocalRanks, init_from_environment
from plait.config.overlap import Policy
from plait.errors import ConfigError, PlaitError
from plait.generate.batch import Limits
from plait.generate.open import build_generating_mesh, check_model, open_batch
from plait.generate.prompts import build_requests, read_prompts
from plait.generate.request import Event, Request, SamplingConfig
from plait.generate.run import Answer, Summary, run_requests
from plait.generate.source import open_source
from plait.sharding import MAX_TP, MeshShape

_TIMEOUT_S = 600.0
"""For a collective that not every rank joins."""


@dataclass(frozen=True)
class Job:
    """All that a rank has to know."""

    folder: Path
    tp: int
    dtype: str
    overlap: Policy
    prompts: tuple[str, ...]
    requests: tuple[Request, ...]
    as_json: bool


_DEFAULTS = SamplingConfig()


@click.command("generate")
@click.argument("folder", metavar="DIR", type=Path)
@click.option("--prompt", "texts", multiple=True, help="A prompt; give it several times for several")
@click.option("--prompts", "prompts_path", type=Path, help='A file of lines {"prompt": "...", "top_k": 5}')
@click.option("--chat", "is_chat", is_flag=True, help="Take each prompt for a user's message, by the chat template")
@click.option("--tp", type=click.IntRange(1, MAX_TP), help="Tensor-parallel degree [default: 1, or the ranks started]")
@click.option("--max-new-tokens", default=_DEFAULTS.max_new_tokens, show_default=True, help="Tokens to generate")
@click.option("--temperature", default=_DEFAULTS.temperature, show_default=True, help="0: the likeliest token")
@click.option("--top-k", default=_DEFAULTS.top_k, show_default=True, help="Draw from so many likeliest; 0: all")
@click.option("--top-p", default=_DEFAULTS.top_p, show_default=True, help="Draw from the fewest that hold so much")
@click.option("--stop", multiple=True, help="A text at which to stop; give it several times for several")
@click.option("--seed", default=_DEFAULTS.seed, show_default=True, help="Of what is drawn")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token")
@dtype_option
@overlap_option
@json_option
def command(folder: Path, as_json: bool, **options: Any) -> None:
    """Continue prompts with the model in DIR, a Hugging Face directory.

    One prompt is answered as it is generated; several together, each printed when it is done. A line of --prompts may
    have settings of its own. The same prompt, seed and settings give the same text whatever else runs beside it. Starts
    ranks on this machine, unless torchrun or Slurm has. Text goes to stdout, how long it took to stderr.
    """
    launch = detect_launch(os.environ)
    job = _check(launch, folder, options, as_json=as_json)
    if launch.kind == "alone":
        summary = _start_local(job)
    else:
        with init_from_environment(launch, _TIMEOUT_S):
            summary = generate_rank(job)
    if launch.rank == 0:
        click.echo(_describe(summary, job), err=True)


def _check(launch: Launch, folder: Path, options: dict[str, Any], *, as_json: bool) -> Job:
    """Check all that each rank can check alone, before any waits for another; one rank of a host reports."""
    try:
        return _build_job(launch, folder, options, as_json=as_json)
    except PlaitError:
        if launch.local_rank == 0:
            raise
        sys.exit(2)


def _build_job(launch: Launch, folder: Path, options: dict[str, Any], *, as_json: bool) -> Job:
    tp = options["tp"] or launch.world_size
    check_world_size(launch, MeshShape(tp=tp))
    names = ("temperature", "top_k", "top_p", "seed", "max_new_tokens", "stop", "ignore_eos")
    sampling = SamplingConfig(**{name: options[name] for name in names})
    given = [(f"--prompt {text!r}", text, sampling) for text in options["texts"]]
    if options["prompts_path"] is not None:
        given += read_prompts(options["prompts_path"], sampling)
    if not given:
        raise ConfigError("generate: there is no prompt", hint="give --prompt TEXT or --prompts FILE.jsonl")
    source = open_source(folder)
    requests = build_requests(source, given, is_chat=options["is_chat"])
    check_model(folder, tp)
    texts = tuple(text for _, text, _ in given)
    return Job(folder, tp, options["dtype"] or source.dtype, options["overlap"], texts, tuple(requests), as_json)


def _start_local(job: Job) -> Summary:
    if job.tp == 1:
        return generate_rank(job)
    with LocalRanks(job.tp, timeout_s=_TIMEOUT_S) as ranks:
        summary: Summary = ranks.call(generate_rank, job=job)[0]
    return summary


def generate_rank(job: Job) -> Summary:
    """Generate on this rank of the world; the first one prints."""
    dtype = getattr(torch, job.dtype)
    mesh = build_generating_mesh(job.tp, dtype)
    batch = open_batch(job.folder, mesh, dtype=dtype, overlap=job.overlap, limits=_derive_limits(job.requests))
    printer = _Printer(job)
    _, summary = run_requests(batch, job.requests, printer.take if mesh.rank == 0 else _ignore)
    return summary


def _derive_limits(requests: Sequence[Request]) -> Limits:
    """The usual ones, but for a cache that has room for the longest request, however long."""
    longest = max(len(request.prompt) + request.sampling.max_new_tokens for request in requests)
    return Limits(max_cache_tokens=max(Limits.max_cache_tokens, longest))


class _Printer:
    """Prints one answer as it comes, several when each is done, in the order of their prompts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._answers = {request.id: Answer() for request in job.requests}
        self._num_printed = 0
        self._is_streaming = len(job.requests) == 1 and not job.as_json

    def take(self, event: Event) -> None:
        """Print what can be printed now."""
        self._answers[event.request_id].add(event)
        if self._is_streaming:
            click.echo(event.text, nl=event.finish_reason is not None)
            return
        for index, request in enumerate(self._job.requests[self._num_printed :], start=self._num_printed):
            answer = self._answers[request.id]
            if answer.finish_reason is None:
                return
            self._print(index, answer)
            self._num_printed = index + 1

    def _print(self, index: int, answer: Answer) -> None:
        prompt = self._job.prompts[index]
        if self._job.as_json:
            record = {"index": index, "prompt": prompt, **vars(answer)}
            click.echo(json.dumps(record, ensure_ascii=False))
        else:
            click.echo(f"{'' if index == 0 else chr(10)}prompt {index + 1}: {prompt}\n{answer.text}")


def _ignore(event: Event) -> None:
    """What other ranks do with an event."""


def _describe(summary: Summary, job: Job) -> str:
    return (
        f"read {summary.num_prompt_tokens:,} tokens and generated {summary.num_new_tokens:,} in "
        f"{summary.elapsed_s:.2f} s: {summary.new_tokens_per_s:.1f} tokens/s on tp={job.tp}; the KV cache took "
        f"{summary.cache_bytes_per_token:,} bytes per token and rank"
    )
