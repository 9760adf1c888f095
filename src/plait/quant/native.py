"""Products of codes as they are, by the kernels of a GPU: FP8 from Ada on, MXFP8 and NVFP4 from Blackwell on.

Those kernels want both factors with what is contracted last, sixteens of it (thirty-twos where two numbers lie in a
byte) and sixteens of rows. What is missing is filled with codes of zero, which leave the product as it is.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from plait.config.recipe import Operand
from plait.contract.quantization import Orientation
from plait.quant.cast import Quantized
from plait.quant.formats import pack
from plait.sharding import Interval

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}


@dataclass(frozen=True)
class Codes:
    """One of the two matrices of a product, as codes.

    Attributes:
        codes: uint8 `[M, K]`, one to a number.
        block_scales: uint8 `[M, K/block]`, before a transposition `[M/block, K]` of columns; None without blocks.
        scale: the tensor's; None where it has none.
        operand: format and scaling.
    """

    codes: Tensor
    block_scales: Tensor | None
    scale: Tensor | None
    operand: Operand

    @classmethod
    def build(cls, quantized: Quantized, orientation: Orientation) -> Self:
        """What products along `orientation` read."""
        codes, block_scales = quantized.view_codes(orientation), quantized.view_block_scales(orientation)
        return cls(codes, block_scales, quantized.scale_of(orientation), quantized.operand)

    @property
    def T(self) -> Self:  # noqa: N802, as torch has it
        """The same numbers, rows as columns."""
        block_scales = None if self.block_scales is None else self.block_scales.T
        return replace(self, codes=self.codes.T, block_scales=block_scales)

    def narrow(self, rows: Interval) -> Self:
        """These rows, whole blocks of them where blocks are of columns."""
        codes, block_scales = self.codes[rows.start : rows.stop], self.block_scales
        if block_scales is not None:
            height = max(1, self.codes.shape[0] // max(1, block_scales.shape[0]))
            block_scales = block_scales[rows.start // height : rows.stop // height]
        return replace(self, codes=codes, block_scales=block_scales)


def multiply_codes(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """`a [M, K] @ b [K, N]` with all scales, `[M, N]` of `dtype`, summed in float32."""
    last = b.T
    rows, columns = a.codes.shape[0], last.codes.shape[0]
    scales_a, recipes_a, swizzles_a = _list_scales(a)
    scales_b, recipes_b, swizzles_b = _list_scales(last)
    product: Tensor = scaled_mm(
        _lay_out(a),
        _lay_out(last).T,
        scales_a,
        recipes_a,
        scales_b,
        recipes_b,
        swizzle_a=swizzles_a,
        swizzle_b=swizzles_b,
        output_dtype=dtype,
    )
    return product[:rows, :columns]


def swizzle(scales: Tensor) -> Tensor:
    """Scales of blocks `[R, n]` as the kernels read them: in tiles of 128 x 4, rows r, r + 32, r + 64, r + 96 together.

    As in the cuBLAS documentation, "1D block scaling factors layout"; zeros fill up the last tiles.
    """
    rows, width = scales.shape
    filled = pad(scales, (0, -width % 4, 0, -rows % 128))
    tiles = filled.view(filled.shape[0] // 128, 4, 32, filled.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def find_capability(device: torch.device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; None of anything else."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def _lay_out(factor: Codes) -> Tensor:
    codes, operand = factor.codes, factor.operand
    unit = 32 if operand.format == "e2m1" else 16
    filled = pad(codes, (0, -codes.shape[1] % unit, 0, -codes.shape[0] % 16)).contiguous()
    return (pack(filled) if operand.format == "e2m1" else filled).view(_DTYPES[operand.format])


def _list_scales(factor: Codes) -> tuple[list[Tensor], list[ScalingType], list[SwizzleType]]:
    scales, recipes, swizzles = [], [], []
    if factor.block_scales is not None:
        is_power = factor.operand.scaling == "block32"
        scales.append(swizzle(factor.block_scales).view(torch.float8_e8m0fnu if is_power else torch.float8_e4m3fn))
        recipes.append(ScalingType.BlockWise1x32 if is_power else ScalingType.BlockWise1x16)
        swizzles.append(SwizzleType.SWIZZLE_32_4_4)
    if factor.scale is not None:
        scales.append(factor.scale.to(torch.float32).view(1))
        recipes.append(ScalingType.TensorWise)
        swizzles.append(SwizzleType.NO_SWIZZLE)
    return scales, recipes, swizzles
