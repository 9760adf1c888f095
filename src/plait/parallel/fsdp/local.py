"""The plain tensor that this rank has of a parameter, or of its gradient."""

import torch
from torch import Tensor


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that FSDP has cut, sharing its memory; any other tensor itself."""
    own = getattr(tensor, "_local_tensor", None)
    return own if isinstance(own, torch.Tensor) else tensor
