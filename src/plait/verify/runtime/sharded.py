"""One training step of the sharded model on one rank: the step of `plait train`, looked at while it is taken."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from plait.comm.mesh import Axis, Mesh, build_mesh
from plait.comm.trace import Trace, record
from plait.config.run import AnyRun, RunConfig
from plait.contract.collective import Collective
from plait.contract.context.sequences import Sequences
from plait.contract.parameter import build_vocab_split
from plait.contract.pipeline.transfer import Transfer
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.execute import Rows
from plait.overlap.receipt import Receipt, check_strict
from plait.overlap.site import Pass
from plait.parallel.apply import intervals_of, ownership_of, record_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.fsdp.local import local_of
from plait.schedule.step import Program, Step
from plait.sharding import Interval
from plait.sharding.token_order import Order, build_order
from plait.train.build import build_native, build_trainer
from plait.train.optimizer import Gradients
from plait.train.step import ComputeLogits, Trainer
from plait.verify.runtime.integers import run_regions
from plait.verify.runtime.pieces import Part, Pieces
from plait.verify.runtime.recipe import Phase, choose_exact_scales, list_phases
from plait.verify.runtime.workload import build_batch, fill_generic_weight, list_micro_batches
from plait.verify.static.trace import Moved


@dataclass(frozen=True)
class RankResult:
    """What a rank sends back beside the file of its tensors.

    Attributes:
        parts: what of each tensor is in its file.
        traces: the collectives of each phase.
        programs: the schedules that ran, one after the other.
        moved: the messages that were sent and received.
        transferred: what pipeline stages sent and received in each phase.
        receipt: how collectives were overlapped; None on one rank.
    """

    parts: dict[str, list[Part]]
    traces: tuple[tuple[Collective, ...], ...]
    programs: tuple[Program, ...]
    moved: tuple[Moved, ...]
    transferred: tuple[tuple[Transfer, ...], ...]
    receipt: Receipt | None


def run_sharded(config: RunConfig, folder: str) -> RankResult:
    """Run on every rank of the mesh; tensors go to `folder`."""
    pieces = Pieces()
    _run_integers(config, build_mesh(config.parallel.mesh_shape), pieces)
    reduce_dtype = getattr(torch, config.precision.reduce_dtype)
    mesh = build_mesh(config.parallel.mesh_shape, reduce_dtype=reduce_dtype)
    traces, passes = _run_steps(config, mesh, pieces)
    pieces.save(folder, mesh.rank)
    moved = tuple((each.direction, each.message) for trace in traces for each in trace.moved)
    issued = tuple(tuple(trace.collectives) for trace in traces)
    transferred = tuple(tuple(trace.transferred) for trace in traces)
    return RankResult(pieces.parts, issued, passes.programs, moved, transferred, passes.receipt)


@dataclass
class Passes:
    """Looks on while collective GEMMs run, and remembers which did."""

    matmul: CollectiveMatmul | None
    seen: list[Program] = field(default_factory=list)

    def enter(self, what: Pass, gemms: Mapping[str, Rows]) -> Mapping[str, Rows]:
        assert self.matmul is not None
        assert self.matmul.running is not None
        self.seen.append(self.matmul.running)
        return gemms

    def note(self, step: Step, start_s: float, end_s: float) -> None:
        """Messages are in the trace."""

    def leave(self) -> None:
        """Nothing is put back."""

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(self.seen)

    @property
    def receipt(self) -> Receipt | None:
        return None if self.matmul is None else self.matmul.receipt


def _run_integers(config: RunConfig, mesh: Mesh, pieces: Pieces) -> None:
    """What has to be equal bit for bit, in float32 whatever the run computes and reduces in; quantized, in float64."""
    model = build_native(choose_exact_scales(config), mesh, is_sharded=False)
    seed_dropout(model, config.seed)
    batch = build_batch(config).take(0, config.train.micro_batch_size)
    set_dropout_offset(model, batch.first_token)
    for piece in run_regions(model, config, batch.tokens.flatten()):
        own = piece.ownership
        pieces.add("integers", own.name, own.shape, own.intervals(mesh.tp.rank), piece.tensor)


def _run_steps(config: RunConfig, mesh: Mesh, pieces: Pieces) -> tuple[list[Trace], Passes]:
    """A step a phase, each the first of an optimizer and from the same weights: only histories go on."""
    trainer = build_trainer(config, mesh)
    record_of_model = record_of(trainer.model)
    assert record_of_model is not None
    passes = Passes(record_of_model.matmul)
    if passes.matmul is not None:
        passes.matmul.instrument = passes
    initial = {name: master.float() for name, master in trainer.optimizer.masters.items()}
    add_parameters(pieces, "initial", trainer.model, initial)
    watched = Watched(config, trainer, pieces)
    traces = []
    for phase in list_phases(config):
        _begin(config, trainer)
        traces.append(watched.step(phase))
        add_parameters(pieces, phase.label("update"), trainer.model, list_local(trainer))
    if passes.receipt is not None and config.overlap.strict:
        check_strict(passes.receipt)
    return traces, passes


def _begin(config: RunConfig, trainer: Trainer) -> None:
    """Generic weights, and an optimizer that has done nothing."""
    model, optimizer = trainer.model, trainer.optimizer
    ownership, intervals = ownership_of(model), intervals_of(model)
    for name, master in optimizer.masters.items():
        fill_generic_weight(master.detach(), name, ownership[name].shape, intervals[name], config)
    optimizer.apply_masters()
    for _, _, moment in optimizer.moments():
        moment.zero_()
    optimizer.resume_at(0)


class Watched:
    """A trainer whose logits, and gradients before they are clipped, are taken down."""

    def __init__(self, config: AnyRun, trainer: Trainer, pieces: Pieces) -> None:
        self.config = config
        self.trainer = trainer
        self.pieces = pieces
        self.phase = Phase()
        self.logits: list[Tensor] = []
        trainer.compute_logits = partial(self._keep_logits, trainer.compute_logits)
        trainer.gradients = _WatchedGradients(trainer.gradients, self._add_gradients)

    def step(self, phase: Phase) -> Trace:
        """One step of the trainer on the batch of `phase`."""
        run, mesh = self.config, self.trainer.mesh
        self.phase, self.logits = phase, []
        batches = list(list_micro_batches(run, mesh.dp.rank, phase.index))
        with record() as trace:
            result = self.trainer.step(batches, run.train.learning_rate)
        first = build_batch(run, phase.index).first_token
        seen = batches if mesh.pp.rank == mesh.pp.degree - 1 else []
        for batch, logits in zip(seen, self.logits, strict=True):
            self._add_logits(logits, batch.first_token - first)
        self.pieces.add_whole(phase.label("loss"), "loss", torch.tensor(result.loss, dtype=torch.float64))
        norm = torch.tensor(result.grad_norm, dtype=torch.float64)
        self.pieces.add_whole(phase.label("gradient norm"), "gradient norm", norm)
        return trace

    def _keep_logits(self, compute: ComputeLogits, model: nn.Module, tokens_BS: Tensor) -> Tensor:
        logits = compute(model, tokens_BS)
        self.logits.append(logits.detach())
        return logits

    def _add_logits(self, logits_TV: Tensor, first_token: int) -> None:
        run, tp = self.config, self.trainer.mesh.tp
        own = build_vocab_split(run.model.vocab_size, tp.degree).intervals[tp.rank]
        shape = (run.tokens_per_step, run.model.vocab_size)
        order = build_order(Order(run.context.order), run.seq_len, run.parallel.cp)
        runs = Sequences(order, self.trainer.mesh.cp.rank).list_runs(Interval(0, len(logits_TV)))
        for rows, piece in zip(runs, logits_TV.split(list(map(len, runs))), strict=True):
            where = (Interval(first_token + rows.start, first_token + rows.stop), own)
            self.pieces.add(self.phase.label("logits"), "logits", shape, where, piece)

    def _add_gradients(self) -> None:
        optimizer, model = self.trainer.optimizer, self.trainer.model
        add_parameters(self.pieces, self.phase.label("gradient"), model, optimizer.list_gradients())


class _WatchedGradients:
    """Gradients that are looked at when they are complete, and nothing has clipped them yet."""

    def __init__(self, gradients: Gradients, look: Callable[[], None]) -> None:
        self.gradients = gradients
        self.look = look

    def zero(self) -> None:
        """Begin a step."""
        self.gradients.zero()

    def expect(self, *, is_last: bool) -> None:
        """Say whether a backward pass is the last."""
        self.gradients.expect(is_last=is_last)

    def all_reduce(self, axis: Axis) -> None:
        """Sum over the data-parallel ranks."""
        self.gradients.all_reduce(axis)

    def scale(self, factor: float) -> None:
        """Multiply all gradients; that is the last thing before the norm."""
        self.gradients.scale(factor)
        self.look()


def list_local(trainer: Trainer) -> dict[str, Tensor]:
    """What this rank has of every parameter that is trained."""
    return {name: local_of(param) for name, param in trainer.optimizer.parameters.items()}


def add_parameters(pieces: Pieces, quantity: str, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Take down this rank's parts of parameters, or of what belongs to them."""
    ownership, intervals = ownership_of(model), intervals_of(model)
    for name, tensor in tensors.items():
        pieces.add(quantity, name, ownership[name].shape, intervals[name], tensor)
