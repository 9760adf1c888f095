"""The step that is verified: a batch, and weights with nothing special about them."""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from plait.config.run import RunConfig
from plait.parallel import rng
from plait.parallel.apply import mesh_of, ownership_of

IGNORE_INDEX = -100

_IGNORED_EVERY = 5
"""Some targets are ignored, so that a mean over all tokens differs from one over the counted ones."""

_SPREAD = 0.25
"""Of biases around 0 and norm weights around 1."""


@dataclass(frozen=True)
class Batch:
    """Token ids `[B, S]` and, flattened, what is to be predicted at each of them `[T]`."""

    tokens: Tensor
    targets: Tensor


def build_batch(config: RunConfig, index: int = 0) -> Batch:
    """Ids drawn from the run's seed, the same in every process, others for each batch."""
    draw = torch.Generator().manual_seed(config.seed + index)
    shape = (config.train.micro_batch_size, config.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, generator=draw)
    targets = torch.randint(config.model.vocab_size, (tokens.numel(),), generator=draw)
    targets[_IGNORED_EVERY - 1 :: _IGNORED_EVERY] = IGNORE_INDEX
    return Batch(tokens, targets)


@torch.no_grad()
def apply_generic_weights(model: nn.Module, config: RunConfig) -> None:
    """Give a model, sharded or not, weights at which no error can hide, representable in the compute dtype and float32.

    Initialisation makes biases zero, norms one and logits nearly constant: a bias added on every rank or attention that
    is wrong would hardly show. Here matrices have rows of about unit length, and biases and norms are spread.
    """
    compute = getattr(torch, config.precision.compute)
    mesh = mesh_of(model)
    rank = 0 if mesh is None else mesh.tp.rank
    for name, ownership in ownership_of(model).items():
        is_matrix = len(ownership.shape) > 1
        mean = 1.0 if not is_matrix and name.endswith(".weight") else 0.0
        std = 1 / sqrt(ownership.shape[-1]) if is_matrix else _SPREAD
        key = rng.derive_key(config.seed, "verify", name)
        param = model.get_parameter(name)
        rng.normal_(param, key, ownership.intervals(rank), ownership.shape, mean=mean, std=std)
        param.copy_(param.float().to(compute))


def first_token(config: RunConfig, index: int = 0) -> int:
    """The token of the run at which a batch begins; not the first one, which would hide a missing offset."""
    return (3 + index) * config.tokens_per_micro_batch
