"""The random Hadamard transform along tokens: outliers are spread, products over tokens stay what they were."""

import torch
from torch import Tensor

from plait.config.recipe import HADAMARD
from plait.errors import ShardingError


def mix(x: Tensor, signs: Tensor) -> Tensor:
    """`H @ diag(signs) @ x` for every sixteen rows of float32 `x [T, K]`, with the orthonormal Hadamard matrix H.

    The same for both factors leaves `dy.T @ x` as it is (Ashkboos et al., arXiv:2404.00456; for training in FP4,
    NVIDIA, arXiv:2509.25149). Sums go by butterflies, so each number has the same bits whatever else is in the tensor:
    those of a matrix product depend on its shape, and a rank would quantize other values than one device does.

    Raises:
        ShardingError: the rows are no whole sixteens.
    """
    rows, width = x.shape
    if rows % HADAMARD:
        raise ShardingError(
            f"{rows} tokens are no whole {HADAMARD}s, which a Hadamard matrix mixes",
            hint=f"make batch times sequence a multiple of {HADAMARD}, or set quantization.hadamard = false",
        )
    mixed = x.view(rows // HADAMARD, HADAMARD, width) * signs.to(x.dtype).view(HADAMARD, 1)
    other = torch.empty_like(mixed)
    half = 1
    while half < HADAMARD:
        shape = (rows // (2 * half), 2, half, width)
        pairs, sums = mixed.view(shape), other.view(shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        mixed, other = other, mixed
        half *= 2
    return mixed.view(rows, width).mul_(HADAMARD**-0.5)
