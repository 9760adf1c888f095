"""Rotary position embedding (Su et al., arXiv:2104.09864) in the rotate-half order of Hugging Face weights."""

from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from plait.config.model import Llama3RopeScaling, LlamaConfig


class RopeTables(NamedTuple):
    """Cosine and sine of every token's angles, `[S, H]` or `[B, S, H]` each, both halves of `H` alike."""

    cos: Tensor
    sin: Tensor


def build_rope_tables(config: LlamaConfig, positions: Tensor, like: Tensor) -> RopeTables:
    """Compute the tables for tokens at `positions`, `[S]` or `[B, S]`, for activations such as `like`.

    Angles are taken in float64: in float32 an angle at position 100,000 is off by 4e-3. The tables are float32 for
    half types, else the dtype of `like`. They are computed anew in each forward (a few small ops), so that there is no
    buffer to be cast, moved, or left empty by the meta device.
    """
    frequencies = derive_rope_frequencies(config, like.device)
    angles = positions.to(like.device, torch.float64).unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), -1)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return RopeTables(angles.cos().to(dtype), angles.sin().to(dtype))


def derive_rope_frequencies(config: LlamaConfig, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position of each of the `H/2` pairs, in float64."""
    pairs = torch.arange(0, config.head_width, 2, dtype=torch.float64, device=device)
    frequencies = config.rope_theta ** (-pairs / config.head_width)
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1's scaling: slow pairs turn `factor` times slower, fast ones as before, those between are blended."""
    turns = scaling.original_max_seq_len * frequencies / (2 * pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def apply_rope(x_BSNH: Tensor, tables: RopeTables) -> Tensor:
    """Rotate queries or keys by their position's angles, computing in the tables' dtype."""
    cos_S1H, sin_S1H = tables.cos.unsqueeze(-2), tables.sin.unsqueeze(-2)
    first, second = x_BSNH.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x_BSNH * cos_S1H + rotated * sin_S1H).to(x_BSNH.dtype)
