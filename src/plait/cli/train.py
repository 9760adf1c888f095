"""`plait train`: train a model under torchrun, under Slurm, or on ranks that it starts itself."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from plait.cli.arguments import overrides_argument
from plait.comm.environment import Launch, check_world_size, detect_launch
from plait.comm.group import own_device
from plait.comm.launch import LocalRanks, init_from_environment
from plait.comm.mesh import build_mesh
from plait.config.load import load_training_config
from plait.config.run import FineTuneConfig, RunConfig
from plait.errors import PlaitError
from plait.train.build import check_model, check_room
from plait.train.claim import check_unclaimed
from plait.train.corpus.tokenize import check_data
from plait.train.faults.restart import permit_resume, train_with_restarts
from plait.train.loop import Summary, train
from plait.train.stop import StopRequest


@click.command("train")
@click.argument("config")
@overrides_argument
def command(config: str, overrides: Sequence[str]) -> None:
    """Train the model of CONFIG, or go on from the newest checkpoint of its run.

    CONFIG is a TOML file; model.path=DIR trains the weights of a Hugging Face directory further. Under torchrun or
    Slurm this process is one rank; alone it starts all ranks of the mesh on this machine. Ctrl-C finishes the
    step, saves it and ends; local ranks of which one dies are started again as often as train.max_restarts says.
    Progress goes to stderr; where the checkpoint and the metrics are, to stdout as JSON.
    """
    launch = detect_launch(os.environ)
    run = _check(launch, config, overrides)
    if launch.kind == "alone":
        summary = _start_local(run)
    else:
        with init_from_environment(launch, run.train.timeout_s, run.train.start_timeout_s) as num_before:
            summary = train_rank(permit_resume(run) if num_before else run)
    if launch.rank == 0:
        click.echo(json.dumps(summary.to_json(), indent=2))


def _check(launch: Launch, config: str, overrides: Sequence[str]) -> RunConfig | FineTuneConfig:
    """Check all that each rank can check alone, before any waits for another; one rank of a host reports."""
    try:
        run = load_training_config(config, overrides)
        check_world_size(launch, run.parallel.mesh_shape)
        check_data(run)
        check_model(run)
        check_room(run, own_device())
    except PlaitError:
        if launch.local_rank == 0:
            raise
        sys.exit(2)
    return run


def _start_local(run: RunConfig | FineTuneConfig) -> Summary:
    if run.parallel.mesh_shape.world_size == 1 and not run.train.max_restarts:
        return train_rank(run)
    check_unclaimed(Path(run.out_dir) / run.name)
    return train_with_restarts(run, _start_ranks)


def _start_ranks(run: RunConfig | FineTuneConfig) -> Summary:
    world_size = run.parallel.mesh_shape.world_size
    click.echo(f"starting {world_size} ranks", err=True)
    ranks = LocalRanks(world_size, timeout_s=run.train.timeout_s, start_timeout_s=run.train.start_timeout_s)
    with ranks, StopRequest(ranks.ask_to_stop):
        summary: Summary = ranks.call(train_rank, run=run)[0]
    return summary


def train_rank(run: RunConfig | FineTuneConfig) -> Summary:
    """Train on this rank of the world."""
    reduce_dtype = getattr(torch, run.precision.reduce_dtype)
    return train(run, build_mesh(run.parallel.mesh_shape, device=own_device(), reduce_dtype=reduce_dtype))
