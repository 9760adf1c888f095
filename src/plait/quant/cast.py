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
from plait.quant.formats import decode, decode_packed, encode, pack, unpack
from plait.quant.hadamard import mix
from plait.quant.pieces import list_pieces
from plait.quant.scale import decode_block_scales, find_multiplier, measure_blocks, scale_blocks
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
        numbers = self.payload.new_empty((self.payload.shape[0], self.width), dtype=dtype)
        for rows in list_pieces(self.payload.device, *numbers.shape):
            numbers[rows] = self.with_payload(self.payload[rows])._decode(orientation)
        return numbers

    def dequantize(self, orientation: Orientation, dtype: torch.dtype) -> Tensor:
        """`[R, width]`, what the codes stand for: a Hadamard transform of the columns is still in it."""
        numbers, scale = self.decode(orientation, dtype), self.scale_of(orientation)
        return numbers if scale is None else numbers.mul_(scale.to(dtype))

    def scale_of(self, orientation: Orientation) -> Tensor | None:
        """The tensor's, which codes and scales of blocks are relative to."""
        return self.scales[self._find(orientation)]

    def view_codes(self, orientation: Orientation) -> Tensor:
        """uint8 `[R, width]`, one to a number."""
        packed = self._view_packed(orientation)
        return unpack(packed) if self.operand.format == "e2m1" else packed

    def view_block_scales(self, orientation: Orientation) -> Tensor | None:
        """uint8 codes of them, `[R, width/block]` of rows or `[R/block, width]` of columns; None without blocks."""
        block = self.operand.block
        if block is None:
            return None
        row_bytes, num_scales = self.operand.row_bytes(self.width), self.width // block
        scales = self.payload.narrow(1, (self._find(orientation) + 1) * row_bytes - num_scales, num_scales)
        return scales if orientation == "rows" else scales.reshape(-1, self.width)

    def _decode(self, orientation: Orientation) -> Tensor:
        packed = self._view_packed(orientation)
        numbers = decode_packed(packed) if self.operand.format == "e2m1" else decode(packed, self.operand.format)
        scales = self.view_block_scales(orientation)
        if scales is not None:
            blocked = _view_blocks(numbers, self.operand, orientation)
            blocked.mul_(decode_block_scales(scales, self.operand).unsqueeze(_block_dim(orientation)))
        return numbers

    def _view_packed(self, orientation: Orientation) -> Tensor:
        row_bytes = self.operand.row_bytes(self.width)
        num_scales = 0 if self.operand.block is None else self.width // self.operand.block
        return self.payload.narrow(1, self._find(orientation) * row_bytes, row_bytes - num_scales)

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
    height, width = x.shape
    _check_blocks(x, operand, orientations)
    x, row_bytes = x.detach(), operand.row_bytes(width)
    payload = x.new_empty((height, len(orientations) * row_bytes), dtype=torch.uint8)
    for rows in list_pieces(x.device, height, width):
        piece = x[rows].to(torch.float32).contiguous()
        for index, orientation in enumerate(orientations):
            mixed = mix(piece, signs) if signs is not None and orientation == "columns" else piece
            drawn = None if noise is None else noise[index][rows]
            codes, block_scales = _quantize(mixed, operand, orientation, scales[index], drawn)
            target = payload[rows].narrow(1, index * row_bytes, row_bytes)
            target[:, : codes.shape[1]] = codes
            if block_scales is not None:
                target[:, codes.shape[1] :] = block_scales.view(len(piece), -1)
    return Quantized(payload, operand, width, orientations, tuple(scales))


def _quantize(
    x: Tensor, operand: Operand, orientation: Orientation, scale: Tensor | None, noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Codes as they travel, and those of the scales of blocks."""
    if operand.block is None:
        assert scale is not None, f"{operand} without a scale"
        return encode(x * find_multiplier(scale), operand.format, noise), None
    dim, blocked = _block_dim(orientation), _view_blocks(x, operand, orientation)
    scales, multipliers = scale_blocks(measure_blocks(blocked, dim), operand, scale)
    codes = encode((blocked * multipliers.unsqueeze(dim)).view(x.shape), operand.format, noise)
    return pack(codes) if operand.format == "e2m1" else codes, scales


def _view_blocks(x: Tensor, operand: Operand, orientation: Orientation) -> Tensor:
    """`[R, width/block, block]` of rows, `[R/block, block, width]` of columns."""
    rows, width = x.shape
    block = operand.block or 1
    return x.view(rows, width // block, block) if orientation == "rows" else x.view(rows // block, block, width)


def _block_dim(orientation: Orientation) -> int:
    return 2 if orientation == "rows" else 1


def _check_blocks(x: Tensor, operand: Operand, orientations: Sequence[Orientation]) -> None:
    if operand.block is None:
        return
    rows, width = x.shape
    # Columns too: their scales are laid out along the rows, `width / block` on each.
    if width % operand.block:
        raise ShardingError(f"{operand}: {width} features are no whole blocks of {operand.block}")
    if "columns" in orientations and rows % operand.block:
        raise ShardingError(
            f"{operand}: {rows} tokens are no whole blocks of {operand.block}",
            hint=f"make batch times sequence a multiple of {operand.block}",
        )
