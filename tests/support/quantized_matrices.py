"""Quantized matrices by scales of their own."""

from collections.abc import Sequence

from torch import Tensor

from plait.config.recipe import Operand
from plait.contract.quantization import Orientation
from plait.quant.cast import Quantized, quantize
from plait.quant.scale import derive_scale, measure_amax

BOTH: tuple[Orientation, ...] = ("rows", "columns")

OPERANDS = {
    "e4m3 current": Operand("e4m3", "current"),
    "e5m2 delayed": Operand("e5m2", "delayed"),
    "e4m3 block32": Operand("e4m3", "block32"),
    "e5m2 block32": Operand("e5m2", "block32"),
    "e2m1 block32": Operand("e2m1", "block32"),
    "e2m1 block16": Operand("e2m1", "block16"),
}


def find_scales(
    x: Tensor,
    operand: Operand,
    orientations: tuple[Orientation, ...] = BOTH,
    *,
    signs: Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[Tensor | None, ...]:
    """Of the tensor, by its own largest magnitudes."""
    if not operand.has_tensor_scale:
        return (None,) * len(orientations)
    amaxes = measure_amax(x, operand, orientations, signs=signs)
    return derive_scale(amaxes, operand, power_of_two=power_of_two).unbind()


def quantize_alone(
    x: Tensor,
    operand: Operand,
    orientations: tuple[Orientation, ...] = BOTH,
    *,
    signs: Tensor | None = None,
    noise: Sequence[Tensor] | None = None,
    power_of_two: bool = False,
) -> Quantized:
    """`x` by its own largest magnitudes."""
    scales = find_scales(x, operand, orientations, signs=signs, power_of_two=power_of_two)
    return quantize(x, operand, orientations, scales, noise=noise, signs=signs)
