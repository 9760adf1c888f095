"""The unsharded model: exact, in float64, and reordered, in the precision that is verified."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.verify.runtime.compare import Step, derive_direction
from plait.verify.runtime.integers import run_regions
from plait.verify.runtime.reordering import apply_reordering
from plait.verify.runtime.workload import IGNORE_INDEX, apply_generic_weights, build_batch, first_token


def run_exact_step(config: RunConfig) -> Step:
    """One training step in float64, from the weights that the sharded model has in its own precision."""
    return _run_step(_build(config).double(), config)


def run_reordered_step(config: RunConfig) -> Step:
    """The same step in the precision of the sharded model, every GEMM summed in another order."""
    model = _build(config).to(getattr(torch, config.precision.compute))
    apply_reordering(model)
    return _run_step(model, config)


def run_initialized(config: RunConfig) -> dict[str, Tensor]:
    """The parameters that training would start from."""
    model = build_model(config.model)
    initialize(model, config.model, config.seed)
    return {name: param.detach() for name, param in model.named_parameters()}


def run_integers(config: RunConfig) -> dict[str, Tensor]:
    """What the integer regions give, in float64."""
    model = build_model(config.model, dtype=torch.float64)
    pieces = run_regions(model, config, build_batch(config).tokens.flatten())
    return {piece.ownership.name: piece.tensor.detach() for piece in pieces}


def _build(config: RunConfig) -> nn.Module:
    model = build_model(config.model)
    apply_generic_weights(model, config)
    seed_dropout(model, config.seed)
    set_dropout_offset(model, first_token(config))
    return model


def _run_step(model: nn.Module, config: RunConfig) -> Step:
    batch, train = build_batch(config), config.train
    logits = model(batch.tokens)
    loss = _compute_loss(logits, batch.targets, train)
    loss.backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm or math.inf)
    updated = {name: _update(param.detach(), param.grad, train) for name, param in model.named_parameters()}
    return Step(logits.detach(), loss.detach(), gradients, norm, updated)


def _update(param: Tensor, gradient: Tensor | None, train: TrainConfig) -> Tensor:
    """AdamW's first step; biases and norm weights do not decay."""
    assert gradient is not None
    decay = train.weight_decay if param.dim() > 1 else 0.0
    return param * (1 - train.learning_rate * decay) - train.learning_rate * derive_direction(gradient, train.eps)


def _compute_loss(logits_TV: Tensor, targets_T: Tensor, train: TrainConfig) -> Tensor:
    """Cross-entropy and z-loss as torch defines them, sharing no code with the vocabulary-parallel loss."""
    logits = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    smoothing = train.label_smoothing
    loss = F.cross_entropy(logits, targets_T, ignore_index=IGNORE_INDEX, label_smoothing=smoothing)
    is_counted = targets_T != IGNORE_INDEX
    return loss + train.z_loss * logits.logsumexp(-1).square()[is_counted].mean()
