"""Numbers of 8 and of 4 bits: float32 values become codes, one to a byte, and back.

    e4m3   448      NaN                 Micikevicius et al., arXiv:2209.05433 (the `fn` format: no infinities)
    e5m2   57344    NaN, infinities
    e2m1   6        neither             Rouhani et al., arXiv:2310.10537
    e8m0   scales of blocks: powers of two from 2**-127 to 2**127, and NaN

What is larger than the largest number becomes that number, infinities too; NaN stays NaN where the format has one.
"""

from functools import cache

import torch
from torch import Tensor

from plait.config.recipe import NumberFormat

LARGEST: dict[NumberFormat, float] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}

_EIGHT_BITS: dict[NumberFormat, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_MANTISSA_BITS: dict[NumberFormat, int] = {"e4m3": 3, "e5m2": 2, "e2m1": 1}
_LEAST_NORMAL: dict[NumberFormat, float] = {"e4m3": 2.0**-6, "e5m2": 2.0**-14, "e2m1": 1.0}

_EXPONENT = 0x7F800000
_MANTISSA = 23
_NAN_SCALE = 255


def encode(x: Tensor, fmt: NumberFormat, noise: Tensor | None = None) -> Tensor:
    """Codes of float32 `x`, uint8 of the same shape: to nearest, ties to even.

    With `noise`, uniform in [0, 1), a value between two neighbours goes to the one farther from zero where its place
    between them is above the noise, so with that probability; a number of the format always stays.
    """
    largest = LARGEST[fmt]
    x = x.clamp(-largest, largest)
    if noise is not None or fmt == "e2m1":
        x = _round(x, fmt, noise)
    return _encode_e2m1(x) if fmt == "e2m1" else x.to(_EIGHT_BITS[fmt]).view(torch.uint8)


def decode(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """The numbers of `codes`, float32 of the same shape, exact."""
    return _look_up(codes, _tabulate(fmt, codes.device))


def pack(codes: Tensor) -> Tensor:
    """Two codes of four bits to a byte, `[..., K] -> [..., K/2]`: the first of a pair lies in the lower half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """`[..., K/2] -> [..., K]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: Tensor) -> Tensor:
    """The e2m1 numbers of `[..., K/2]` bytes, float32 `[..., K]`."""
    return _look_up(packed, _tabulate_pairs(packed.device)).view(torch.float32)


def encode_e8m0(x: Tensor) -> Tensor:
    """The least power of two that is not below `x >= 0`, as the biased exponent; NaN and infinity become NaN (255).

    As `cvt.rp.satfinite.ue8m0x2.f32` does it on NVIDIA's GPUs, for what is finite.
    """
    bits = x.view(torch.int32)
    # A float32 without exponent is below 2**-126: up to 2**-127 it has code 0, and then 1.
    is_above = torch.where(bits < 1 << _MANTISSA, bits > 1 << (_MANTISSA - 1), (bits & ~_EXPONENT) != 0)
    return ((bits >> _MANTISSA) + is_above).clamp_(max=_NAN_SCALE).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """The powers of two, float32."""
    return codes.view(torch.float8_e8m0fnu).to(torch.float32)


def invert_e8m0(codes: Tensor) -> Tensor:
    """What a number is multiplied by to be divided by its scale, float32.

    Exact for scales up to 2**126, and a block of finite numbers has none above; for NaN it is zero.
    """
    return ((254 - codes.to(torch.int32)).clamp_(min=0) << _MANTISSA).view(torch.float32)


def _round(x: Tensor, fmt: NumberFormat, noise: Tensor | None) -> Tensor:
    """To numbers of the format."""
    # The bits of the exponent alone are the power of two below; those of NaN are infinity, and NaN comes out again.
    binade = (x.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=_LEAST_NORMAL[fmt])
    step = binade.mul_(2.0 ** -_MANTISSA_BITS[fmt])
    if noise is None:
        # Numbers that are even multiples of their step have an even code.
        return (x / step).round_().mul_(step)
    steps = x.abs().div_(step)
    whole = steps.floor()
    # One where the place between two neighbours is above the noise, else zero: floats, which are faster than booleans.
    return whole.add_(steps.sub_(whole).sub_(noise).ceil_()).mul_(step).copysign_(x)


def _encode_e2m1(x: Tensor) -> Tensor:
    """Codes of float32 numbers of the format, and of NaN those of the largest one.

    torchao's own cast is in its prototypes, and ml_dtypes knows numpy's arrays only.
    """
    # 2**-14 times as large they are the first numbers of e5m2, whose second bit of mantissa stays empty.
    codes = x.mul(2.0**-14).to(torch.float8_e5m2).view(torch.uint8)
    return ((codes >> 1) & 7) | ((codes >> 4) & 8)


def _look_up(codes: Tensor, table: Tensor) -> Tensor:
    # A third of the time of indexing by brackets, a fifth of torch's cast from e4m3.
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@cache
def _tabulate(fmt: NumberFormat, device: torch.device) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if fmt != "e2m1":
        return codes.view(_EIGHT_BITS[fmt]).to(torch.float32)
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


@cache
def _tabulate_pairs(device: torch.device) -> Tensor:
    """Both numbers of a byte, in the 8 bytes of an int64."""
    pairs = decode(unpack(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)), "e2m1")
    return pairs.view(torch.int64).flatten()
