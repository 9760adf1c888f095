"""Numbers of 8 and of 4 bits: float32 values become codes, one to a byte, and back.

    e4m3   448      NaN                 Micikevicius et al., arXiv:2209.05433 (the `fn` format: no infinities)
    e5m2   57344    NaN, infinities
    e2m1   6        neither             Rouhani et al., arXiv:2310.10537
    e8m0   scales of blocks: powers of two from 2**-127 to 2**127, and NaN

What is larger than the largest number becomes that number, infinities too; NaN stays NaN where the format has one.
"""

import torch
from torch import Tensor

from plait.config.recipe import NumberFormat

LARGEST: dict[NumberFormat, float] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}

_EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_MANTISSA_BITS: dict[NumberFormat, int] = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
_LEAST_NORMAL: dict[NumberFormat, float] = {"e4m3": 2.0**-6, "e5m2": 2.0**-14, "e2m1": 1.0}

_EXPONENT = 0x7F800000
_MANTISSA = 23
_SHIFT_E2M1 = _MANTISSA - 1
_BIAS_E2M1 = (127 - 1) << 1
_HALVES = 2.0**22
"""A float32 as large has a spacing of 1/2: what is added to it is rounded to halves."""

_NAN_SCALE = 255


def encode(x: Tensor, fmt: NumberFormat, noise: Tensor | None = None) -> Tensor:
    """Codes of float32 `x`, uint8 of the same shape: to nearest, ties to even.

    With `noise`, uniform in [0, 1), a value between two neighbours goes to the one farther from zero where its place
    between them is above the noise, so with that probability; a number of the format always stays.
    """
    largest = LARGEST[fmt]
    x = x.clamp(-largest, largest)
    if noise is not None:
        x = _round_by(noise, x, fmt)
    return _encode_e2m1(x) if fmt == "e2m1" else x.to(_EIGHT_BITS[fmt]).view(torch.uint8)


def decode(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """The numbers of `codes`, float32 of the same shape, exact."""
    if fmt == "e2m1":
        # Under e4m3's larger bias the same exponent and mantissa mean a number 2**6 times as small.
        moved = ((codes & 8) << 4) | ((codes & 7) << 2)
        return decode(moved, "e4m3").mul_(2.0**6)
    return codes.view(_EIGHT_BITS[fmt]).to(torch.float32)


def pack(codes: Tensor) -> Tensor:
    """Two codes of four bits to a byte, `[..., K] -> [..., K/2]`: the first of a pair lies in the lower half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """`[..., K/2] -> [..., K]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def encode_e8m0(x: Tensor) -> Tensor:
    """The least power of two that is not below `x >= 0`, as the biased exponent; NaN and infinity become NaN (255).

    As `cvt.rp.satfinite.ue8m0x2.f32` does it on NVIDIA's GPUs, for what is finite.
    """
    bits = x.view(torch.int32)
    # A float32 without exponent is at most 2**-126: up to 2**-127 it has code 0, and then 1.
    is_above = torch.where(bits < 1 << _MANTISSA, bits > 1 << (_MANTISSA - 1), (bits & ~_EXPONENT) != 0)
    return ((bits >> _MANTISSA) + is_above).masked_fill_(~x.isfinite(), _NAN_SCALE).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """The powers of two, float32."""
    return codes.view(torch.float8_e8m0fnu).to(torch.float32)


def invert_e8m0(codes: Tensor) -> Tensor:
    """What a number is multiplied by to be divided by its scale, exact: 2**-127 has an inverse in float32.

    Scales up to 2**126 have, more than `encode_e8m0` gives of amax / LARGEST; that of NaN is zero.
    """
    return ((254 - codes.to(torch.int32)).clamp_(min=0) << _MANTISSA).view(torch.float32)


def _encode_e2m1(x: Tensor) -> Tensor:
    # torchao's cast for this format is a prototype, ml_dtypes knows numpy arrays only: bits of float32, as they do it.
    signed = x.view(torch.int32)
    bits = signed & 0x7FFFFFFF
    magnitude = bits.view(torch.float32)
    small = (magnitude + _HALVES).view(torch.int32) & 7
    is_odd = (bits >> _SHIFT_E2M1) & 1
    rounded = (bits + is_odd + ((1 << (_SHIFT_E2M1 - 1)) - 1)) >> _SHIFT_E2M1
    code = torch.where(magnitude < 1, small, (rounded - _BIAS_E2M1).clamp_(max=7))
    return (code | ((signed >> 28) & 8)).to(torch.uint8)


def _round_by(noise: Tensor, x: Tensor, fmt: NumberFormat) -> Tensor:
    least = _LEAST_NORMAL[fmt]
    # Where x is NaN the exponent's bits alone are infinity, and NaN comes out again.
    binade = (x.view(torch.int32) & _EXPONENT).view(torch.float32).clamp(min=least)
    step = binade.mul_(2.0 ** -_MANTISSA_BITS[fmt])
    steps = x.abs().div_(step)
    whole = steps.floor()
    whole += noise < steps.sub_(whole)
    return whole.mul_(step).copysign_(x)
