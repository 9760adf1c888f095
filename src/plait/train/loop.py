"""The whole of a training run on one rank: data, model, resume, steps, metrics, checkpoints."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.config.run import RunConfig
from plait.contract.model import derive_plan
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.parallel.apply import parallelize
from plait.parallel.dropout import seed_dropout
from plait.train.data import Windows, read_micro_batches
from plait.train.metrics import MetricsFile, Rates, Record
from plait.train.optimizer import AdamW, Gradients
from plait.train.progress import ProgressDisplay
from plait.train.replicas import check_replicas, check_same_batch, check_same_config
from plait.train.schedule import derive_learning_rate
from plait.train.state import Position, derive_identity, find_checkpoint, resume, save
from plait.train.step import StepResult, Trainer
from plait.train.stop import StopRequest
from plait.train.tokenize import prepare_tokens


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    loss: float | None
    """Of the last step; None where nothing was left to do."""
    checkpoint: Path
    metrics: Path
    resumed_from: Path | None
    was_stopped: bool


@dataclass(frozen=True)
class Done:
    """One step that was taken."""

    position: Position
    """After the step."""
    result: StepResult
    learning_rate: float
    elapsed_s: float


def train(run: RunConfig, mesh: Mesh) -> Summary:
    """Train on every rank of the mesh, from the run's newest checkpoint where there is one, and save the last step.

    Raises:
        PlaitError: on every rank, with what went wrong on any.
    """
    check_same_config(run, mesh)
    stream = prepare_tokens(run, mesh)
    with together(mesh):
        windows = Windows(stream, run.seq_len, run.seed)
    trainer = build_trainer(run, mesh)
    identity = derive_identity(run, len(stream))
    resumed_from = find_checkpoint(trainer)
    position = resume(trainer, resumed_from, identity) if resumed_from is not None else Position()
    with ExitStack() as stack:
        log = stack.enter_context(RunLog(run, mesh, position))
        request = stack.enter_context(StopRequest())
        saved, done = resumed_from, None
        for done in take_steps(trainer, windows, position, request):
            log.write(done)
            is_last = done.position.step == run.train.steps or done.result.is_stop_requested
            if is_last or is_due(done.position.step, run.train.checkpoint_every):
                saved = save(trainer, done.position, identity)
    assert saved is not None, position
    return Summary(
        step=done.position.step if done else position.step,
        loss=done.result.loss if done else None,
        checkpoint=saved,
        metrics=log.metrics_path,
        resumed_from=resumed_from,
        was_stopped=done is not None and done.position.step < run.train.steps,
    )


def build_trainer(run: RunConfig, mesh: Mesh) -> Trainer:
    """Build this rank's part of the model, initialized, with gradients and optimizer; the whole is never in memory."""
    plan = derive_plan(run.model, sequence_parallel=run.parallel.sequence_parallel)
    model = parallelize(build_model(run.model, device="meta"), mesh, plan)
    model.to_empty(device=mesh.device)
    initialize(model, run.model, run.seed)
    seed_dropout(model, run.seed)
    parameters = dict(model.named_parameters())
    optimizer = AdamW(parameters, getattr(torch, run.precision.compute), run.train)
    return Trainer(run, mesh, model, Gradients(parameters), optimizer)


def take_steps(trainer: Trainer, windows: Windows, position: Position, request: StopRequest) -> Iterator[Done]:
    """Take the steps that are left, until the last or until any rank was asked to stop."""
    run, mesh = trainer.run, trainer.mesh
    first_step = position.step
    while position.step < run.train.steps:
        started = time.perf_counter()
        batches = list(read_micro_batches(windows, run, position.consumed_sequences, mesh.dp.rank))
        if position.step == first_step:
            check_same_batch(batches, mesh)
        learning_rate = derive_learning_rate(position.step, run.train)
        result = trainer.step(batches, learning_rate, stop=request.is_made)
        position = position.advance(run)
        if is_due(position.step, run.train.check_replicas_every):
            check_replicas(trainer.model, mesh)
        yield Done(position, result, learning_rate, time.perf_counter() - started)
        if result.is_stop_requested:
            return


def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps, 0 meaning never, is done after `step`."""
    return every > 0 and step % every == 0


class RunLog:
    """What one rank, the first, writes and shows of a run while it goes on."""

    def __init__(self, run: RunConfig, mesh: Mesh, position: Position) -> None:
        self.metrics_path = Path(run.out_dir) / run.name / "metrics.jsonl"
        self._run, self._mesh, self._position = run, mesh, position
        self._is_writer = mesh.rank == 0
        self._rates = Rates.build(run, mesh.device)

    def __enter__(self) -> "RunLog":
        run, step = self._run, self._position.step
        with together(self._mesh), ExitStack() as stack:
            if self._is_writer:
                self._metrics = stack.enter_context(
                    MetricsFile(self.metrics_path, resumed_step=step, tensorboard=run.train.tensorboard)
                )
            self._display = stack.enter_context(
                ProgressDisplay(run.name, run.train.steps, step, is_shown=self._is_writer)
            )
            self._stack = stack.pop_all()
        self._display.say(self._describe_start())
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def write(self, done: Done) -> None:
        """Write one step to the metrics, and show it."""
        step = done.position.step
        record: Record = {
            "step": step,
            "loss": done.result.loss,
            "grad_norm": done.result.grad_norm,
            "learning_rate": done.learning_rate,
            "tokens": done.position.consumed_sequences * self._run.seq_len,
            **self._rates.measure(done.elapsed_s),
        }
        if self._is_writer:
            self._metrics.write(record)
        if step % self._run.train.log_every == 0 or done.result.is_stop_requested:
            self._display.show(step, record)
        if done.result.is_stop_requested:
            self._display.say(f"asked to stop: saving step {step}")

    def _describe_start(self) -> str:
        run, step = self._run, self._position.step
        begin = f"from step {step}" if step else "from the start"
        return f"{run.name}: {run.parallel.mesh_shape} on {self._mesh.device}, {begin} to {run.train.steps}"
