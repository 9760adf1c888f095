"""A quantized matrix: bytes that travel as they lie, and the scales that all ranks agreed on before.

A row of the payload has, for each orientation in order, the codes of its numbers and behind them scales of blocks:

    e4m3, e5m2   one byte a number                    rows      those of the blocks of the row: width/block bytes
    e2m1         two in a byte, the first below       columns   a block is `block` rows high: each of them carries
                                                                width/block of the scales of its `width` blocks

so any rows that are whole blocks are a quantized matrix themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from plait.config.recipe import Operand
from plait.contract.quantization import Orientation
from plait.errors import ShardingError
from plait.quant.formats import decode, encode, pack, unpack
from plait.quant.hadamard import mix
from plait.quant.scale import decode_block_scales, find_multiplier, scale_blocks
from plait.sharding import Interval


@dataclass(frozen=True)
class Quantized:
    """A matrix `[R, width]` in codes.

    Attributes:
        payload: uint8 `[R, len(orientations) * operand.row_bytes(width)]`.
        scales: of the tensor, float64 without dims, for each orientation; None where blocks have all there is.
    """

    payload: Tensor
    operand: Operand
    width: int
    orientations: tuple[Orientation, ...]
    scales: tuple[Tensor | None, ...]

    def narrow(self, rows: Interval) -> Self:
        """These rows: whole blocks of them where there are columns."""
        return self.with_payload(self.payload[rows.start : rows.stop])

    def with_payload(self, payload: Tensor) -> Self:
        """Other rows of the same tensor, such as those of all ranks."""
        return replace(self, payload=payload)

    def decode(self, orientation: Orientation, dtype: torch.dtype) -> Tensor:
        """`[R, width]` without the tensor's scale, exact in float32 and float64."""
        numbers = decode(self.view_codes(orientation), self.operand.format)
        scales = self.view_block_scales(orientation)
        if scales is not None:
            blocked = _view_blocks(numbers, self.operand, orientation)
            blocked.mul_(decode_block_scales(scales, self.operand).unsqueeze(_block_dim(orientation)))
        return numbers.to(dtype)

    def dequantize(self, orientation: Orientation, dtype: torch.dtype) -> Tensor:
        """`[R, width]`, what the codes stand for: a Hadamard transform of the columns is still in it."""
        numbers, scale = self.decode(orientation, dtype), self.scale_of(orientation)
        return numbers if scale is None else numbers.mul_(scale.to(dtype))

    def scale_of(self, orientation: Orientation) -> Tensor | None:
        """The tensor's, which codes and scales of blocks are relative to."""
        return self.scales[self._find(orientation)]

    def view_codes(self, orientation: Orientation) -> Tensor:
        """uint8 `[R, width]`, one to a number."""
        row_bytes = self.operand.row_bytes(self.width)
        num_scales = 0 if self.operand.block is None else self.width // self.operand.block
        codes = self.payload.narrow(1, self._find(orientation) * row_bytes, row_bytes - num_scales)
        return unpack(codes) if self.operand.format == "e2m1" else codes

    def view_block_scales(self, orientation: Orientation) -> Tensor | None:
        """uint8 codes of them, `[R, width/block]` of rows or `[R/block, width]` of columns; None without blocks."""
        block = self.operand.block
        if block is None:
            return None
        row_bytes, num_scales = self.operand.row_bytes(self.width), self.width // block
        scales = self.payload.narrow(1, (self._find(orientation) + 1) * row_bytes - num_scales, num_scales)
        return scales if orientation == "rows" else scales.reshape(-1, self.width)

    def _find(self, orientation: Orientation) -> int:
        """Where there are no blocks, one orientation stands for both."""
        is_both = self.operand.block is None and len(self.orientations) == 1
        return 0 if is_both else self.orientations.index(orientation)


def quantize(
    x: Tensor,
    operand: Operand,
    orientations: tuple[Orientation, ...],
    scales: Sequence[Tensor | None],
    *,
    noise: Sequence[Tensor] | None = None,
    signs: Tensor | None = None,
) -> Quantized:
    """The codes of `x [R, width]` in each orientation, each from `x` itself, of which float32 values are seen.

    Args:
        x: the matrix.
        operand: format and scaling.
        orientations: those that are to be read.
        scales: of the tensor in each orientation, by `derive_scale`; None for block32.
        noise: for stochastic rounding: in each orientation `[R, width]` numbers in [0, 1).
        signs: of the Hadamard transform of the columns.

    Raises:
        ShardingError: rows or features are no whole blocks.
    """
    x = x.detach().to(torch.float32).contiguous()
    parts = []
    for index, orientation in enumerate(orientations):
        mixed = mix(x, signs) if signs is not None and orientation == "columns" else x
        drawn = None if noise is None else noise[index]
        parts += _quantize(mixed, operand, orientation, scales[index], drawn)
    payload = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return Quantized(payload, operand, x.shape[1], orientations, tuple(scales))


def _quantize(
    x: Tensor, operand: Operand, orientation: Orientation, scale: Tensor | None, noise: Tensor | None
) -> list[Tensor]:
    if operand.block is None:
        assert scale is not None, f"{operand} without a scale"
        return [encode(x * find_multiplier(scale), operand.format, noise)]
    _check_blocks(x, operand.block, orientation)
    dim = _block_dim(orientation)
    blocked = _view_blocks(x, operand, orientation)
    scales, multipliers = scale_blocks(blocked.abs().amax(dim), operand, scale)
    codes = encode((blocked * multipliers.unsqueeze(dim)).view(x.shape), operand.format, noise)
    return [pack(codes) if operand.format == "e2m1" else codes, scales.view(x.shape[0], -1)]


def _view_blocks(x: Tensor, operand: Operand, orientation: Orientation) -> Tensor:
    """`[R, width/block, block]` of rows, `[R/block, block, width]` of columns."""
    rows, width = x.shape
    block = operand.block or 1
    return x.view(rows, width // block, block) if orientation == "rows" else x.view(rows // block, block, width)


def _block_dim(orientation: Orientation) -> int:
    return 2 if orientation == "rows" else 1


def _check_blocks(x: Tensor, block: int, orientation: Orientation) -> None:
    rows, width = x.shape
    # Columns too: their scales are laid out along the rows, `width / block` on each.
    if width % block:
        raise ShardingError(f"{width} features are no whole blocks of {block}")
    if orientation == "columns" and rows % block:
        raise ShardingError(f"{rows} tokens are no whole blocks of {block}")
