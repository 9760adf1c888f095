"""The unsharded model: exact, in float64, and reordered, in the precision that is verified."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.verify.runtime.compare import Step
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
    pieces = run_regions(model, config, build_batch(config).tokens_BS.flatten())
    return {piece.ownership.name: piece.tensor.detach() for piece in pieces}


def _build(config: RunConfig) -> nn.Module:
    model = build_model(config.model)
    apply_generic_weights(model, config)
    seed_dropout(model, config.seed)
    set_dropout_offset(model, first_token(config))
    return model


def _run_step(model: nn.Module, config: RunConfig) -> Step:
    batch, train = build_batch(config), config.train
    logits = model(batch.tokens_BS)
    loss = _compute_loss(logits, batch.targets_T, train)
    loss.backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm or float("inf"))
    _build_optimizer(model, train).step()
    updated = {name: param.detach() for name, param in model.named_parameters()}
    return Step(logits.detach(), loss.detach(), gradients, norm, updated)


def _build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """Torch's AdamW; biases and norm weights do not decay."""
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.eps)


def _compute_loss(logits_TV: Tensor, targets_T: Tensor, train: TrainConfig) -> Tensor:
    """Cross-entropy and z-loss as torch defines them, sharing no code with the vocabulary-parallel loss."""
    logits = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    smoothing = train.label_smoothing
    loss = F.cross_entropy(logits, targets_T, ignore_index=IGNORE_INDEX, label_smoothing=smoothing)
    is_counted = targets_T != IGNORE_INDEX
    return loss + train.z_loss * logits.logsumexp(-1).square()[is_counted].mean()
