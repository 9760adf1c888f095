"""Starting local ranks again when one of them has died, hung or crashed, as torchrun does for its own."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

import click

from plait.checkpoint.names import list_checkpoints
from plait.config.run import FineTuneConfig, RunConfig
from plait.errors import TransportError
from plait.train.claim import clear_leftovers
from plait.train.metrics import read_metrics
from plait.train.state import checkpoint_folder

SummaryT = TypeVar("SummaryT")


def train_with_restarts(
    run: RunConfig | FineTuneConfig, attempt: Callable[[RunConfig | FineTuneConfig], SummaryT]
) -> SummaryT:
    """Call `attempt`, which starts ranks and trains, and again after a failure of a rank, `train.max_restarts` times.

    What is wrong with the config, the data or the disk would be wrong again, and a loss that diverged would diverge
    again: such an error ends the run at once. After each failure what was being written is removed, and it is said what
    failed and which steps are lost with it.

    Raises:
        PlaitError: what the ranks ended with.
    """
    folder = Path(run.out_dir) / run.name
    for number in count(1):
        try:
            return attempt(run)
        except KeyboardInterrupt:
            clear_leftovers(folder)
            raise
        except TransportError as error:
            clear_leftovers(folder)
            lost = describe_lost_steps(run)
            if number > run.train.max_restarts:
                raise type(error)(error.message, hint=f"{lost}; the same command goes on from there") from None
            click.echo(f"error: {error.message}\n\n{lost}: restart {number} of {run.train.max_restarts}\n", err=True)
        run = permit_resume(run)
    raise AssertionError("a count has no end")


def permit_resume(run: RunConfig | FineTuneConfig) -> RunConfig | FineTuneConfig:
    """The run as ranks go on with it that are started again: with the checkpoints that it has saved itself."""
    if run.train.resume != "never":
        return run
    return run.model_copy(update={"train": run.train.model_copy(update={"resume": "auto"})})


def describe_lost_steps(run: RunConfig | FineTuneConfig) -> str:
    """How far the run was, and how far what is saved is."""
    records = read_metrics(Path(run.out_dir) / run.name / "metrics.jsonl")
    taken: int = records[-1]["step"] if records else 0
    saved = max((step for step, _ in list_checkpoints(checkpoint_folder(run))), default=0)
    if not taken:
        return "no step was taken"
    if taken == saved:
        return f"step {taken} was taken and is saved, nothing is lost"
    lost = f"{taken - saved} {'step is' if taken - saved == 1 else 'steps are'} lost"
    return f"step {taken} was taken, step {saved} is saved, {lost}" if saved else f"step {taken} was taken, {lost}"
