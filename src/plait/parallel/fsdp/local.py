"""The plain tensor that this rank has of a parameter, or of its gradient."""

import torch
from torch import Tensor

from plait.comm.mesh import Axis


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that FSDP has cut, sharing its memory; any other tensor itself."""
    # Not `to_local`, which makes another tensor each time: an optimizer knows what it updates by identity.
    own = getattr(tensor, "_local_tensor", None)
    return own if isinstance(own, torch.Tensor) else tensor


def count_share(tensor: Tensor, axis: Axis | None) -> int:
    """Elements of a tensor on the rank that has most of those of `axis`, over which FSDP cuts its rows, if any."""
    return -(-tensor.shape[0] // (1 if axis is None else axis.degree)) * tensor.shape[1:].numel()
