"""Keys and values as they travel: one tensor `[S, 2, B, K, H]`, tokens first, so that every piece is contiguous."""

import torch
from torch import Tensor


def pack(k: Tensor, v: Tensor) -> Tensor:
    """`[B, K, S, H]` twice as `[S, 2, B, K, H]`."""
    return torch.stack([k, v]).permute(3, 0, 1, 2, 4).contiguous()


def unpack(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views `[B, K, S, H]` of keys and of values."""
    k, v = kv.permute(1, 2, 3, 0, 4)
    return k, v
