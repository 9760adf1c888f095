"""One rank's part of a verification: initialise, run the integer regions, take a training step, record everything."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from plait.comm.mesh import Mesh, build_mesh
from plait.comm.trace import Trace, record
from plait.config.run import RunConfig
from plait.contract.collective import Collective
from plait.contract.model import derive_plan
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.execute import Rows
from plait.overlap.receipt import Receipt, check_strict
from plait.overlap.site import Pass
from plait.parallel.apply import ownership_of, parallelize, record_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.grad_norm import clip_grad_norm_
from plait.parallel.loss import vocab_parallel_cross_entropy
from plait.parallel.precision.model import update_amax_history
from plait.schedule.step import Program, Step
from plait.sharding import Columns, Ownership
from plait.train.optimizer import AdamW, Gradients
from plait.verify.runtime.integers import run_regions
from plait.verify.runtime.pieces import Pieces
from plait.verify.runtime.recipe import CALIBRATED, Phase, choose_exact_scales, list_phases
from plait.verify.runtime.workload import IGNORE_INDEX, apply_generic_weights, build_batch, first_token
from plait.verify.static.trace import Moved


@dataclass(frozen=True)
class RankResult:
    """What a rank sends back beside the file of its tensors.

    Attributes:
        ownership: who owns what of each tensor.
        traces: the collectives of each phase.
        programs: the schedules that ran, one after the other.
        moved: the messages that were sent and received.
        receipt: how collectives were overlapped; None on one rank.
    """

    ownership: dict[str, Ownership]
    traces: tuple[tuple[Collective, ...], ...]
    programs: tuple[Program, ...]
    moved: tuple[Moved, ...]
    receipt: Receipt | None


def run_sharded(config: RunConfig, folder: str) -> RankResult:
    """Run on every rank of a launched group; tensors go to `folder`."""
    pieces = Pieces()
    _run_exact_parts(config, build_mesh(config.parallel.mesh_shape), pieces)
    reduce_dtype = getattr(torch, config.precision.reduce_dtype)
    mesh = build_mesh(config.parallel.mesh_shape, reduce_dtype=reduce_dtype)
    traces, passes = _run_step(config, mesh, pieces)
    pieces.save(folder, mesh.tp.rank)
    moved = tuple((each.direction, each.message) for trace in traces for each in trace.moved)
    issued = tuple(tuple(trace.collectives) for trace in traces)
    return RankResult(pieces.ownership, issued, passes.programs, moved, passes.receipt)


@dataclass
class _Passes:
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


def _run_exact_parts(config: RunConfig, mesh: Mesh, pieces: Pieces) -> None:
    """What has to be equal bit for bit, in float32 whatever the run computes and reduces in; quantized, in float64."""
    model = _build(choose_exact_scales(config), mesh)
    _add_parameters(pieces, "initial", model)
    if config.quantization.resolved is not None:
        model.double()
    seed_dropout(model, config.seed)
    set_dropout_offset(model, first_token(config))
    for piece in run_regions(model, config, build_batch(config).tokens.flatten()):
        pieces.add("integers", piece.ownership, piece.tensor)


def _build(config: RunConfig, mesh: Mesh, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_model(config.model, device="meta", dtype=dtype)
    sequence_parallel = config.parallel.sequence_parallel
    plan = derive_plan(config.model, sequence_parallel=sequence_parallel, quantization=config.quantization)
    parallelize(model, mesh, plan, overlap=config.overlap, quantization=config.quantization)
    model.to_empty(device=mesh.device)
    initialize(model, config.model, config.seed)
    return model


def _run_step(config: RunConfig, mesh: Mesh, pieces: Pieces) -> tuple[list[Trace], _Passes]:
    compute = getattr(torch, config.precision.compute)
    model = _build(config, mesh, torch.promote_types(compute, torch.float32))
    record_of_model = record_of(model)
    assert record_of_model is not None
    passes = _Passes(record_of_model.matmul)
    if passes.matmul is not None:
        passes.matmul.instrument = passes
    apply_generic_weights(model, config)
    params = dict(model.named_parameters())
    optimizer = AdamW(params, compute, config.train)
    gradients = Gradients(params, torch.promote_types(compute, torch.float32))
    seed_dropout(model, config.seed)
    traces, phases = [], list_phases(config)
    for phase in phases:
        gradients.zero()
        traces.append(_run_phase(config, phase, model, mesh, pieces))
    optimizer.step(config.train.learning_rate)
    _add_parameters(pieces, phases[-1].label("update"), model)
    if passes.receipt is not None and config.overlap.strict:
        check_strict(passes.receipt)
    return traces, passes


def _run_phase(config: RunConfig, phase: Phase, model: nn.Module, mesh: Mesh, pieces: Pieces) -> Trace:
    """Up to the gradient norm; the update of histories that a phase begins with is in its trace."""
    batch, train, vocab_size = build_batch(config, phase.index), config.train, config.model.vocab_size
    set_dropout_offset(model, first_token(config, phase.index))
    with record() as trace:
        if phase is CALIBRATED:
            update_amax_history(model)
        logits = model(batch.tokens)
        loss = vocab_parallel_cross_entropy(
            logits,
            batch.targets,
            mesh,
            vocab_size=vocab_size,
            ignore_index=IGNORE_INDEX,
            label_smoothing=train.label_smoothing,
            z_loss=train.z_loss,
        )
        loss.backward()
        _add_gradients(pieces, phase.label("gradient"), model)
        norm = clip_grad_norm_(model, train.max_grad_norm or math.inf)
    T = config.tokens_per_micro_batch
    vocab = Columns().build_split(vocab_size, mesh.tp.degree)
    pieces.add(phase.label("logits"), Ownership("logits", (T, vocab_size), 1, vocab), logits)
    pieces.add(phase.label("loss"), Ownership("loss", ()), loss)
    pieces.add(phase.label("gradient norm"), Ownership("gradient norm", ()), norm)
    return trace


def _add_parameters(pieces: Pieces, quantity: str, model: nn.Module) -> None:
    for name, ownership in ownership_of(model).items():
        pieces.add(quantity, ownership, model.get_parameter(name))


def _add_gradients(pieces: Pieces, quantity: str, model: nn.Module) -> None:
    for name, ownership in ownership_of(model).items():
        param = model.get_parameter(name)
        pieces.add(quantity, ownership, torch.zeros_like(param) if param.grad is None else param.grad)
