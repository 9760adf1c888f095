"""Initialisation of our models, the same numbers for every tp degree."""

from math import sqrt

import torch
from torch import Tensor, nn

from plait.config.model import ModelConfig
from plait.parallel.apply import intervals_of, ownership_of
from plait.parallel.fsdp.local import local_of
from plait.parallel.rng import derive_key, normal_
from plait.sharding import Interval, Ownership

WEIGHT_STD = 0.02

_RESIDUAL_OUTPUTS = ("attention.wo.weight", "mlp.w_down.weight")


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter as a function of `seed`, its name and the global index of each element, never of the shard.

    Norm weights become 1, biases 0, everything else normal of std 0.02; what writes into the residual stream gets
    0.02/sqrt(2L), so that the stream's variance does not grow with depth (GPT-2's rule).
    """
    _tie_embeddings(model, config)
    ownership, intervals = ownership_of(model), intervals_of(model)
    for name, parameter in model.named_parameters():
        std, key = derive_std(name, config.num_layers), derive_key(seed, "init", name)
        _fill(local_of(parameter), ownership[name], intervals[name], std, key)


def derive_std(name: str, num_layers: int) -> float:
    """Standard deviation of the weights of parameter `name`."""
    return WEIGHT_STD / sqrt(2 * num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else WEIGHT_STD


def _fill(own: Tensor, ownership: Ownership, intervals: tuple[Interval, ...], std: float, key: int) -> None:
    module, _, kind = ownership.name.rpartition(".")
    if kind == "bias":
        own.zero_()
    elif module.endswith("norm"):
        own.fill_(1)
    else:
        normal_(own, key, intervals, ownership.shape, std=std)


def _tie_embeddings(model: nn.Module, config: ModelConfig) -> None:
    """Make the tied weight one parameter again: `to_empty` gives each of its two names its own memory.

    A pipeline stage may have but one of them, or none.
    """
    if config.tied_embeddings and {"embedding", "head"} <= model._modules.keys():
        model.get_submodule("head").weight = model.get_submodule("embedding").weight
