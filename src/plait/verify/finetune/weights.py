"""Weights with nothing special about them, in the place of a directory's and of adapters, whose `B` begins as zeros.

At trained weights some gradients are what is left of large addends, and rounding would pass for a mistake, or hide one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plait.config.run import FineTuneConfig
from plait.hf.directory.source import take_part
from plait.hf.stored import stored_of
from plait.parallel.apply import intervals_of
from plait.parallel.fsdp.local import local_of
from plait.sharding import Interval
from plait.verify.runtime.workload import fill_generic_weight


@torch.no_grad()
def fill_weights(model: nn.Module, masters: Mapping[str, Tensor], config: FineTuneConfig) -> None:
    """Fill this rank's part of every parameter, in its master where it has one; the same on every mesh."""
    stored, intervals = stored_of(model), intervals_of(model)
    for name, param in model.named_parameters():
        place = stored[name]
        whole = torch.empty(place.shape)
        fill_generic_weight(whole, place.name, place.shape, tuple(Interval(0, size) for size in place.shape), config)
        own = take_part(whole, place)[tuple(slice(own.start, own.stop) for own in intervals[name])]
        masters.get(name, local_of(param)).copy_(own)


def list_initial(model: nn.Module, masters: Mapping[str, Tensor], config: FineTuneConfig) -> dict[str, Tensor]:
    """This rank's part of every parameter as it begins, in float32: of what is not trained, as it is computed with."""
    compute = getattr(torch, config.precision.compute)
    return {
        name: (masters[name] if name in masters else local_of(param).to(compute)).detach().float().clone()
        for name, param in model.named_parameters()
    }
