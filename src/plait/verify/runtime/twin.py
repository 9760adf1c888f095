"""The unsharded model: exact, in float64, and reordered, in the precision that is verified.

With a recipe it is the model of `QuantizedLinear`s that `parallelize` makes on one rank, exact but for the quantizers.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm.mesh import build_mesh
from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.contract.model import derive_plan
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.parallel.apply import enter_sequences, parallelize
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.precision.model import update_amax_history
from plait.sharding import Interval, MeshShape
from plait.train.corpus.windows import IGNORE_INDEX
from plait.verify.runtime.compare import Step, derive_direction
from plait.verify.runtime.integers import run_regions
from plait.verify.runtime.recipe import Phase
from plait.verify.runtime.reordering import apply_reordering
from plait.verify.runtime.workload import build_batch, fill_generic_weight


def run_exact_steps(config: RunConfig, phases: Sequence[Phase]) -> list[Step]:
    """One training step a phase, in float64, from the weights that the sharded model has in its own precision."""
    return _run_steps(_build(config).double(), config, phases)


def run_reordered_steps(config: RunConfig, phases: Sequence[Phase]) -> list[Step]:
    """The same steps in the precision of the sharded model, every GEMM summed in another order."""
    model = _build(config).to(getattr(torch, config.precision.compute))
    apply_reordering(model)
    return _run_steps(model, config, phases)


def run_initialized(config: RunConfig) -> dict[str, Tensor]:
    """The parameters that training would start from."""
    model = build_model(config.model)
    initialize(model, config.model, config.seed)
    return {name: param.detach() for name, param in model.named_parameters()}


def run_integers(config: RunConfig) -> dict[str, Tensor]:
    """What the integer regions give, in float64."""
    model = _quantize(build_model(config.model, dtype=torch.float64), config)
    batch = build_batch(config).take(0, config.train.micro_batch_size)
    set_dropout_offset(model, batch.first_token)
    pieces = run_regions(model, config, batch.tokens.flatten())
    return {piece.ownership.name: piece.tensor.detach() for piece in pieces}


def _build(config: RunConfig) -> nn.Module:
    model = build_model(config.model)
    for name, param in model.named_parameters():
        whole = tuple(Interval(0, size) for size in param.shape)
        fill_generic_weight(param, name, tuple(param.shape), whole, config)
    return _quantize(model, config)


def _quantize(model: nn.Module, config: RunConfig) -> nn.Module:
    """What `parallelize` makes of a model on one rank, which is nothing without a recipe."""
    if config.quantization.resolved is not None:
        plan = derive_plan(config.model, quantization=config.quantization)
        parallelize(model, build_mesh(MeshShape()), plan, quantization=config.quantization)
    seed_dropout(model, config.seed)
    return model


def _run_steps(model: nn.Module, config: RunConfig, phases: Sequence[Phase]) -> list[Step]:
    steps = []
    for phase in phases:
        model.zero_grad()
        steps.append(_run_step(model, config, phase))
        update_amax_history(model)
    return steps


def _run_step(model: nn.Module, config: RunConfig, phase: Phase) -> Step:
    """All sequences of the step at once; with a recipe one micro-batch after the other, as each has its own scales.

    Gradients are divided by the number of targets when they are complete: quantizers see those of the sum.
    """
    batch, train = build_batch(config, phase.index), config.train
    num_targets = (batch.targets != IGNORE_INDEX).sum()
    size = len(batch.tokens) if config.quantization.resolved is None else train.micro_batch_size
    logits, losses = [], []
    for first in range(0, len(batch.tokens), size):
        micro_batch = batch.take(first, size)
        set_dropout_offset(model, micro_batch.first_token)
        enter_sequences(model, config.seq_len, micro_batch.documents)
        logits_TV = model(micro_batch.tokens)
        loss = sum_losses(logits_TV, micro_batch.targets, train)
        loss.backward()
        logits.append(logits_TV.detach())
        losses.append(loss.detach())
    loss = torch.stack(losses).sum()
    return finish_step(dict(model.named_parameters()), torch.cat(logits), loss, num_targets, train)


def finish_step(
    params: Mapping[str, nn.Parameter], logits: Tensor, loss: Tensor, num_targets: Tensor, train: TrainConfig
) -> Step:
    """What comes of the sums of losses and gradients over all targets: means, their norm, and one update."""
    gradients: dict[str, Tensor] = {}
    for name, param in params.items():
        assert param.grad is not None, name
        param.grad /= num_targets
        gradients[name] = param.grad.clone()
    norm = nn.utils.clip_grad_norm_(params.values(), train.max_grad_norm or math.inf)
    updated = {name: update_parameter(param.detach(), param.grad, train) for name, param in params.items()}
    return Step(logits, loss / num_targets, gradients, norm, updated)


def update_parameter(param: Tensor, gradient: Tensor | None, train: TrainConfig) -> Tensor:
    """AdamW's first step; biases and norm weights do not decay."""
    assert gradient is not None
    decay = train.weight_decay if param.dim() > 1 else 0.0
    return param * (1 - train.learning_rate * decay) - train.learning_rate * derive_direction(gradient, train.eps)


def sum_losses(logits_TV: Tensor, targets_T: Tensor, train: TrainConfig) -> Tensor:
    """Cross-entropy and z-loss as torch defines them, sharing no code with the vocabulary-parallel loss."""
    logits = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    smoothing, is_counted = train.label_smoothing, targets_T != IGNORE_INDEX
    losses = F.cross_entropy(logits, targets_T, ignore_index=IGNORE_INDEX, label_smoothing=smoothing, reduction="sum")
    return losses + train.z_loss * logits.logsumexp(-1).square()[is_counted].sum()
