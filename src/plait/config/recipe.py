"""Precision recipes: in which number format, and with which scales, a linear reads its input, weight and gradient.

    forward   y  = x @ w.T      x and w in blocks along the input features
    dgrad     dx = dy @ w       dy and w in blocks along the output features
    wgrad     dw = dy.T @ x     dy and x in blocks along the tokens

FP8 as in Micikevicius et al., arXiv:2209.05433; MX blocks as in Rouhani et al., arXiv:2310.10537; NVFP4 as in NVIDIA,
arXiv:2509.25149.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Literal

NumberFormat = Literal["e4m3", "e5m2", "e2m1"]
"""Bits of exponent and of mantissa, beside the sign."""

Scaling = Literal["current", "delayed", "block32", "block16"]
"""One scale for the tensor, by its largest magnitude or by those of earlier steps; or one for every 32 numbers, a power
of two (e8m0), or for every 16, an e4m3 number, beside one of the tensor."""

NAMES = ("none", "fp8_currentscaling", "fp8_delayedscaling", "mxfp8", "nvfp4")
RecipeName = Literal["none", "fp8_currentscaling", "fp8_delayedscaling", "mxfp8", "nvfp4"]

_BITS: dict[NumberFormat, int] = {"e4m3": 8, "e5m2": 8, "e2m1": 4}
_BLOCKS: dict[Scaling, int] = {"block32": 32, "block16": 16}


@dataclass(frozen=True)
class Operand:
    """How one of the three tensors of a linear is quantized."""

    format: NumberFormat
    scaling: Scaling

    @property
    def block(self) -> int | None:
        """How many numbers share a scale; None where all of the tensor do."""
        return _BLOCKS.get(self.scaling)

    @property
    def has_tensor_scale(self) -> bool:
        """Whether there is a float32 scale of the whole tensor, alone or above those of blocks."""
        return self.scaling != "block32"

    @property
    def needs_amax(self) -> bool:
        """Whether the largest magnitude of the whole tensor has to be known before it is quantized."""
        return self.scaling in ("current", "block16")

    def row_bytes(self, width: int) -> int:
        """What a row of `width` numbers takes, with the scales of its blocks: a byte for each."""
        scales = 0 if self.block is None else width // self.block
        return width * _BITS[self.format] // 8 + scales

    def __str__(self) -> str:
        return f"{self.format} {self.scaling}"


@dataclass(frozen=True)
class Recipe:
    """What holds for every linear that is quantized.

    Attributes:
        margin: by how many powers of two a delayed scale stays below what its history would allow.
        amax_history: how many steps a delayed scale looks back.
        power_of_two_scales: whether scales of tensors are rounded down to powers of two.
        stochastic_rounding: of gradients, so that rounding errors average out.
        hadamard: whether what wgrad contracts is first mixed in sixteens along the tokens by a random Hadamard matrix,
            which spreads outliers and leaves the product as it is.
    """

    name: str
    input: Operand
    weight: Operand
    gradient: Operand
    margin: int = 0
    amax_history: int = 16
    power_of_two_scales: bool = False
    stochastic_rounding: bool = False
    hadamard: bool = False

    @property
    def operands(self) -> dict[str, Operand]:
        """By what they are."""
        return {"input": self.input, "weight": self.weight, "gradient": self.gradient}

    @property
    def token_unit(self) -> int:
        """Tokens that have to stay on one rank: a block of what wgrad contracts, or a Hadamard matrix."""
        mixed = HADAMARD if self.hadamard else 1
        return lcm(self.input.block or 1, self.gradient.block or 1, mixed)

    @property
    def feature_unit(self) -> int:
        """Features that have to stay on one rank: a block of what a linear contracts."""
        return lcm(*(operand.block or 1 for operand in self.operands.values()))

    @property
    def uncalibrated(self) -> "Recipe":
        """What holds before there is a history: every delayed scale is a current one."""
        current: dict[str, Any] = {
            name: replace(operand, scaling="current")
            for name, operand in self.operands.items()
            if operand.scaling == "delayed"
        }
        return replace(self, **current)

    @property
    def is_delayed(self) -> bool:
        """Whether some scale looks back at earlier steps."""
        return any(operand.scaling == "delayed" for operand in self.operands.values())


HADAMARD = 16
"""Order of the Hadamard matrix."""


def _build(name: str, forward: NumberFormat, backward: NumberFormat, scaling: Scaling) -> Recipe:
    operand = Operand(forward, scaling)
    return Recipe(name, operand, operand, Operand(backward, scaling))


RECIPES: dict[str, Recipe] = {
    "fp8_currentscaling": _build("fp8_currentscaling", "e4m3", "e5m2", "current"),
    "fp8_delayedscaling": _build("fp8_delayedscaling", "e4m3", "e5m2", "delayed"),
    "mxfp8": _build("mxfp8", "e4m3", "e4m3", "block32"),
    "nvfp4": Recipe(
        "nvfp4",
        Operand("e2m1", "block16"),
        Operand("e2m1", "block16"),
        Operand("e2m1", "block16"),
        stochastic_rounding=True,
        hadamard=True,
    ),
}
"""The named ones; a run may change each of them in parts."""
