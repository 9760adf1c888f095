"""The whole of a training run on one rank: data, model, resume, steps, metrics, checkpoints."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.config.run import FineTuneConfig, RunConfig
from plait.errors import PlaitError
from plait.overlap.receipt import Receipt, build_empty_receipt, check_strict
from plait.parallel.apply import receipt_of
from plait.parallel.precision.model import find_precisions
from plait.train.build import build_trainer
from plait.train.claim import claim_folder
from plait.train.corpus.tokenize import find_document_end, prepare_tokens
from plait.train.corpus.windows import Windows, read_micro_batches
from plait.train.faults.pace import PaceMeter
from plait.train.log import Done, RunLog
from plait.train.metrics import count_step_flops
from plait.train.replicas import check_replicas, check_same_batch, check_same_config
from plait.train.saves import Saves
from plait.train.schedule import derive_learning_rate
from plait.train.state import Position, derive_identity, find_checkpoint, resume
from plait.train.step import Trainer
from plait.train.stop import StopRequest


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    step: int
    loss: float | None
    """Of the last step; None where nothing was left to do."""
    checkpoint: Path
    metrics: Path
    receipt: Path | None
    """What was overlapped; None on one rank."""
    resumed_from: Path | None
    was_stopped: bool

    def to_json(self) -> dict[str, str | int | float | bool | None]:
        """For printing: paths as text."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


def train(run: RunConfig | FineTuneConfig, mesh: Mesh) -> Summary:
    """Train on every rank of the mesh, from the run's newest checkpoint where there is one, and save the last step.

    Raises:
        PlaitError: on every rank, with what went wrong on any.
    """
    with StopRequest() as request:
        check_same_config(run, mesh)
        stream = prepare_tokens(run, mesh)
        with together(mesh):
            windows = Windows(stream, run.seq_len, run.seed, end_of_text=find_document_end(run))
        trainer = build_trainer(run, mesh)
        with claim_folder(Path(run.out_dir) / run.name, mesh):
            with together(mesh):
                identity = derive_identity(trainer, stream)
            return _run_and_save(trainer, windows, identity, request)


def _run_and_save(trainer: Trainer, windows: Windows, identity: Mapping[str, Any], request: StopRequest) -> Summary:
    run = trainer.run
    found = find_checkpoint(trainer)
    saved = resumed_from = found.folder
    position = resume(trainer, resumed_from, identity) if resumed_from is not None else Position()
    loss = None
    receipt = find_receipt(trainer)
    flops = count_step_flops(run, trainer.model)
    with (
        RunLog(run, trainer.mesh, position.step, flops, receipt, notes=found.skipped) as log,
        Saves(trainer, identity) as saves,
    ):
        for done in take_steps(trainer, windows, position, request):
            if run.overlap.strict and receipt is not None:
                check_strict(receipt)
            log.write(done)
            position, loss = done.position, done.result.loss
            is_last = position.step == run.train.steps or done.result.is_stop_requested
            if is_last or is_due(position.step, run.train.checkpoint_every):
                saved = saves.save(position)
            elif saves.has_failed:
                request.make()
    assert saved is not None, position
    was_stopped = position.step < run.train.steps
    return Summary(position.step, loss, saved, log.metrics_path, log.receipt_path, resumed_from, was_stopped)


def find_receipt(trainer: Trainer) -> Receipt | None:
    """What is overlapped and what multiplies, and how; None where there is nothing to say about it."""
    overlap = trainer.run.overlap
    receipt = receipt_of(trainer.model)
    precision = next((each.describe() for each in find_precisions(trainer.model)), None)
    # A pipeline stage may have nothing that is quantized, and ranks write the receipt together.
    is_quantized = trainer.run.quantization.resolved is not None
    if receipt is None and (overlap.is_asked_for or is_quantized):
        return build_empty_receipt(overlap.asked, precision)
    return receipt


def take_steps(trainer: Trainer, windows: Windows, position: Position, request: StopRequest) -> Iterator[Done]:
    """Take the steps that are left, until the last or until any rank was asked to stop."""
    run, mesh = trainer.run, trainer.mesh
    first_step = position.step
    meter = PaceMeter(mesh, run.train.check_pace_every)
    while position.step < run.train.steps:
        started = meter.begin()
        batches = list(read_micro_batches(windows, run, position.consumed_sequences, mesh.dp.rank))
        if position.step == first_step:
            check_same_batch(batches, mesh)
        learning_rate = derive_learning_rate(position.step, run.train)
        result = trainer.step(batches, learning_rate, stop=request.is_made)
        if not result.num_targets:
            raise PlaitError(
                f"step {position.step + 1} has nothing to learn from: every token in it is the last of a document",
                hint="look at the corpus, and at data.end_of_text_id",
            )
        position = position.advance(run)
        if is_due(position.step, run.train.check_replicas_every):
            check_replicas(trainer.model, mesh)
        elapsed_s = meter.end(started)
        yield Done(position, result, learning_rate, elapsed_s, meter.compare())
        if result.is_stop_requested:
            return


def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps, 0 meaning never, is done after `step`."""
    return every > 0 and step % every == 0
