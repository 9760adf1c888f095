"""Scales: of a whole tensor by its largest magnitude, and of its blocks.

A number is its code's value, times its block's scale, times its tensor's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.config.recipe import Operand
from plait.contract.quantization import Orientation
from plait.quant.formats import LARGEST, decode, decode_e8m0, encode, encode_e8m0, invert_e8m0
from plait.quant.hadamard import mix
from plait.quant.pieces import list_pieces

_FLOAT32 = torch.finfo(torch.float32)
_LEAST_BLOCK_SCALE = 2.0**-6
"""Of block16, the least e4m3 number with all its mantissa: as torchao has it."""


def measure_amax(
    x: Tensor, operand: Operand, orientations: Sequence[Orientation], *, signs: Tensor | None = None
) -> Tensor:
    """The largest magnitude of `x [R, width]`, float32 `[len(orientations)]`: infinity where something is not finite.

    With the `signs` of a Hadamard transform that of the columns is of the mixed ones.
    """
    assert operand.has_tensor_scale, f"{operand}: blocks have their own scales, and the tensor none"
    are_mixed = [signs is not None and orientation == "columns" for orientation in orientations]
    measured = {is_mixed: _measure(x.detach(), signs if is_mixed else None) for is_mixed in set(are_mixed)}
    return torch.stack([measured[is_mixed] for is_mixed in are_mixed])


def derive_scale(amax: Tensor, operand: Operand, *, margin: int = 0, power_of_two: bool = False) -> Tensor:
    """What a code stands in for, from the largest magnitude of the tensor: float64 of the same shape.

    Without blocks, numbers are multiplied by the float32 `s = largest of the format / amax / 2**margin`, as in
    Transformer Engine and torchao, and this is 1/s: in float64 because s has to come out of it again. For block16 it is
    the float32 `amax / (6 * 448)`, as in torchao. Where all is zero, so that any would do, it is 1.

    Raises nothing: of an infinite amax the scale is infinite, and what is quantized by it is NaN.
    """
    amax = amax.to(torch.float32)
    is_zero = amax == 0
    largest = LARGEST[operand.format]
    if operand.block is None:
        factor = torch.full_like(amax, largest).div_(amax).mul_(2.0**-margin).clamp_(max=_FLOAT32.max)
        if power_of_two:
            factor = _floor_to_power_of_two(factor)
        return factor.masked_fill_(is_zero, 1.0).to(torch.float64).reciprocal_()
    scale = _divide(amax, largest * LARGEST["e4m3"]).mul_(2.0**margin).clamp_(min=_FLOAT32.tiny)
    if power_of_two:
        scale = _floor_to_power_of_two(scale.reciprocal_()).reciprocal_()
    return scale.masked_fill_(is_zero, 1.0).to(torch.float64)


def measure_blocks(x: Tensor, dim: int) -> Tensor:
    """The largest magnitudes along `dim` of float32 `x`; NaN where there is one."""
    # Of floats that are not negative the bits are in the same order, NaN last: integers are twice as fast.
    return (x.view(torch.int32) & 0x7FFFFFFF).amax(dim).view(torch.float32)


def find_multiplier(scale: Tensor) -> Tensor:
    """The float32 that numbers without blocks are multiplied by before they are encoded."""
    return scale.reciprocal().to(torch.float32)


def scale_blocks(amax: Tensor, operand: Operand, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales of blocks, as uint8 codes, and the float32 numbers that their elements are multiplied by.

    block32: a power of two, rounded up so that nothing saturates (NVIDIA, arXiv:2506.08027); a block that is not finite
    has scale NaN, one of zeros the least. block16: e4m3, relative to `scale`, the tensor's.
    """
    if scale is None:
        codes = encode_e8m0(_divide(amax, LARGEST[operand.format]))
        return codes, invert_e8m0(codes)
    tensor_scale = scale.to(torch.float32)
    relative = _divide(amax, LARGEST[operand.format]).div_(tensor_scale)
    codes = encode(relative.clamp_(min=_LEAST_BLOCK_SCALE), "e4m3")
    return codes, tensor_scale.reciprocal() / decode(codes, "e4m3")


def decode_block_scales(codes: Tensor, operand: Operand) -> Tensor:
    """Those of blocks alone, float32."""
    return decode_e8m0(codes) if operand.scaling == "block32" else decode(codes, "e4m3")


def _measure(x: Tensor, signs: Tensor | None) -> Tensor:
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    if signs is None:
        extremes = torch.stack(torch.aminmax(x))
    else:
        pieces = (mix(x[rows].to(torch.float32), signs) for rows in list_pieces(x.device, *x.shape))
        extremes = torch.stack([extreme for piece in pieces for extreme in torch.aminmax(piece)])
    amax = extremes.abs().amax().to(torch.float32)
    return amax.masked_fill_(~amax.isfinite(), torch.inf)


def _divide(x: Tensor, number: float) -> Tensor:
    # Where one of both is a Python number, torch may multiply by a reciprocal, which rounds twice.
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _floor_to_power_of_two(x: Tensor) -> Tensor:
    mantissa = 0x007FFFFF
    return (x.view(torch.int32) & ~mantissa).view(torch.float32)
