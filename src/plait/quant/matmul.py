"""Products of quantized matrices.

    y = (scale_a * scale_b) * (a @ b) + addend          a [M, K], b [K, N]

Codes and scales of blocks are decoded exactly into the accumulator's dtype and multiplied there.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from plait.contract.quantization import Orientation
from plait.quant.cast import Quantized
from plait.sharding import Interval


@dataclass(frozen=True)
class Factor:
    """One of the two matrices of a product, in the accumulator's dtype.

    Attributes:
        numbers: without the tensor's scale.
        scale: the tensor's, float64 without dims; None where it has none.
    """

    numbers: Tensor
    scale: Tensor | None

    @property
    def T(self) -> Self:  # noqa: N802, as torch has it
        """The same numbers, rows as columns."""
        return type(self)(self.numbers.T, self.scale)

    def narrow(self, rows: Interval) -> Self:
        """These rows."""
        return type(self)(self.numbers[rows.start : rows.stop], self.scale)


def find_accumulator(dtype: torch.dtype) -> torch.dtype:
    """In what products of quantized `dtype` tensors are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def prepare(quantized: Quantized, orientation: Orientation, dtype: torch.dtype) -> Factor:
    """What products along `orientation` read, with `dtype` as their accumulator."""
    return Factor(quantized.decode(orientation, dtype), quantized.scale_of(orientation))


def multiply(a: Factor, b: Factor, addend: Tensor | None, *, out: Tensor) -> None:
    """`out = a @ b + addend`, rounded to the dtype of `out` once; the addend may be `out` itself, or a bias `[N]`."""
    is_direct = out.dtype == a.numbers.dtype and addend is not out
    product = torch.mm(a.numbers, b.numbers, out=out if is_direct else None)
    scales = [scale for scale in (a.scale, b.scale) if scale is not None]
    if scales:
        product.mul_(torch.stack(scales).prod().to(product.dtype))
    if addend is not None:
        product.add_(addend)
    if product is not out:
        out.copy_(product)
