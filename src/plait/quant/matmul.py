"""Products of quantized matrices.

    y = (scale_a * scale_b) * (a @ b) + addend          a [M, K], b [K, N]

Codes and scales of blocks are decoded exactly into the accumulator's dtype and multiplied there, or the device
multiplies them as they are.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from plait.contract.quantization import Orientation
from plait.quant.cast import Quantized
from plait.quant.native import Codes, multiply_codes
from plait.quant.select import Kernel
from plait.sharding import Interval


@dataclass(frozen=True)
class Numbers:
    """One of the two matrices of a product, in the accumulator's dtype.

    Attributes:
        numbers: `[M, K]`, without the tensor's scale.
        scale: the tensor's, float64 without dims; None where it has none.
    """

    numbers: Tensor
    scale: Tensor | None

    @property
    def T(self) -> Self:  # noqa: N802, as torch has it
        """The same numbers, rows as columns."""
        return replace(self, numbers=self.numbers.T)

    def narrow(self, rows: Interval) -> Self:
        """These rows."""
        return replace(self, numbers=self.numbers[rows.start : rows.stop])


Factor = Numbers | Codes


def find_accumulator(dtype: torch.dtype) -> torch.dtype:
    """In what products of quantized `dtype` tensors are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def prepare(
    quantized: Quantized, orientation: Orientation, dtype: torch.dtype, *, kernel: Kernel = "emulation"
) -> Factor:
    """What products along `orientation` read; `dtype` is that of the accumulator of an emulation."""
    if kernel == "native":
        return Codes.build(quantized, orientation)
    return Numbers(quantized.decode(orientation, dtype), quantized.scale_of(orientation))


def multiply(a: Factor, b: Factor, addend: Tensor | None, *, out: Tensor) -> None:
    """`out = a @ b + addend`, rounded to the dtype of `out` once; the addend may be `out` itself, or a bias `[N]`."""
    if isinstance(a, Codes) and isinstance(b, Codes):
        product = multiply_codes(a, b, out.dtype if addend is None else torch.float32)
    else:
        assert isinstance(a, Numbers), f"{type(a).__name__} times {type(b).__name__}"
        assert isinstance(b, Numbers), f"{type(a).__name__} times {type(b).__name__}"
        product = _multiply_numbers(a, b, out if out.dtype == a.numbers.dtype and addend is not out else None)
    if addend is not None:
        product.add_(addend)
    if product is not out:
        out.copy_(product)


def _multiply_numbers(a: Numbers, b: Numbers, out: Tensor | None) -> Tensor:
    product = torch.mm(a.numbers, b.numbers, out=out)
    scales = [scale for scale in (a.scale, b.scale) if scale is not None]
    return product.mul_(torch.stack(scales).prod().to(product.dtype)) if scales else product
