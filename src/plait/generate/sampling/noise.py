"""Gumbel noise as a function of (seed, position, vocabulary id): the same for every tp degree, batch and device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.parallel.rng import derive_key, hash_index_

_NUM_BITS = 52
"""So that every uniform number is a float64 between 0 and 1, neither of them included."""


def derive_bases(seeds_and_positions: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """`[R]` int64: where in the sequence of random words the tokens of each row begin."""
    keys = [derive_key(seed, "token", position) for seed, position in seeds_and_positions]
    return torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys], dtype=torch.int64, device=device)


def gumbel_noise(bases_R: Tensor, ids: Tensor) -> Tensor:
    """`[R, n]` float64 for the vocabulary ids `[R, n]` or `[n]`.

    A library's logarithm may round differently in the vector body of a loop and in its tail, so that the last bit may
    depend on the cut; for that to change a token, two scores must agree in 15 digits.
    """
    word = hash_index_(bases_R.unsqueeze(1) + ids, 0)
    unit = ((word >> (64 - _NUM_BITS)) & ((1 << _NUM_BITS) - 1)).double().add_(0.5).mul_(2.0**-_NUM_BITS)
    return unit.log_().neg_().log_().neg_()
