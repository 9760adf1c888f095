"""What the GEMMs of parallel linears multiply: tensors as they are, or quantized ones, some rows at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.contract.quantization import Orientation
from plait.overlap.execute import Outcome
from plait.quant import matmul
from plait.quant.cast import Quantized
from plait.quant.select import Kernel
from plait.sharding import Interval


@dataclass(frozen=True)
class QuantizedMatrix:
    """`[R, width]` in codes, as one GEMM reads it.

    Attributes:
        dtype: in which products are summed.
        kernel: what multiplies.
    """

    quantized: Quantized
    orientation: Orientation
    dtype: torch.dtype
    kernel: Kernel

    def take(self, rows: Interval, full: Tensor | None) -> matmul.Factor:
        """These rows; of `full`, the bytes of all ranks, where they were gathered."""
        quantized = self._find(full)
        if len(rows) < quantized.payload.shape[0]:
            quantized = quantized.narrow(rows)
        return matmul.prepare(quantized, self.orientation, self.dtype, kernel=self.kernel)

    def prepare(self) -> matmul.Factor:
        """All rows."""
        return matmul.prepare(self.quantized, self.orientation, self.dtype, kernel=self.kernel)

    def dequantize(self, full: Tensor | None = None) -> Tensor:
        """The numbers themselves, `[R, width]`, of all ranks where they were gathered."""
        return self._find(full).dequantize(self.orientation, self.dtype)

    def _find(self, full: Tensor | None) -> Quantized:
        return self.quantized if full is None else self.quantized.with_payload(full)


Matrix = Tensor | QuantizedMatrix
"""`[R, width]`, some rows of which are multiplied at a time."""

Factor = Tensor | matmul.Factor
"""What is multiplied."""


def payload_of(matrix: Matrix | None) -> Tensor | None:
    """What moves where it is gathered."""
    return matrix.quantized.payload if isinstance(matrix, QuantizedMatrix) else matrix


def take(matrix: Matrix | None, rows: Interval, full: Tensor | None = None) -> Factor:
    """These rows, of `full` where that was gathered; of what a GEMM reads that is wanted."""
    if isinstance(matrix, QuantizedMatrix):
        return matrix.take(rows, full)
    x = matrix if full is None else full
    assert x is not None, rows
    return take_rows(x, rows)


def take_rows(x: Tensor, rows: Interval) -> Tensor:
    """These rows of a tensor."""
    # Slicing costs as much as a small GEMM.
    start, stop = rows.start, rows.stop
    return x if stop - start == x.shape[0] else x[start:stop]


def flatten(x: Tensor) -> Tensor:
    """`[R, width]` of a tensor of any leading dims; itself where it is that already, which costs nothing to see."""
    return x if x.dim() == 2 else x.flatten(0, -2)


def unflatten(x: Tensor, shape: torch.Size) -> Tensor:
    """`[R, width]` in the shape of what it belongs to."""
    return x if len(shape) == 2 else x.view(shape)


def multiply(a: Factor, b: Factor, addend: Tensor | None, *, out: Tensor) -> None:
    """`out = a @ b + addend`; the addend may be `out` itself."""
    # Tensors first: this is called for every piece of every small GEMM.
    if isinstance(a, Tensor):
        if addend is None:
            torch.mm(a, b, out=out)  # type: ignore[arg-type]
        else:
            torch.addmm(addend, a, b, out=out)  # type: ignore[arg-type]
        return
    assert not isinstance(b, Tensor), "a quantized matrix times one that is not"
    matmul.multiply(a, b, addend, out=out)


def add_product(total: Tensor | None, a: Factor, b: Factor, like: Tensor) -> Tensor:
    """`total + a @ b`, in `total` itself; without one a product of its own, in shape and dtype as `like`."""
    if total is None and isinstance(a, Tensor):
        return torch.mm(a, b)  # type: ignore[arg-type]
    out = torch.empty_like(like) if total is None else total
    multiply(a, b, total, out=out)
    return out


def sum_rows(matrix: Matrix, full: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum over all rows, `[width]`, of `full` where that was gathered."""
    if isinstance(matrix, Tensor):
        return (matrix if full is None else full).sum(0)
    return matrix.dequantize(full).sum(0).to(dtype)


def keep_full(matrix: Matrix, outcome: Outcome, dtype: torch.dtype) -> Tensor | None:
    """What GEMMs have read of a matrix of all ranks, as one's own; None of a tensor that was not gathered."""
    if isinstance(matrix, Tensor):
        return outcome.keep_full()
    return matrix.dequantize(outcome.full).to(dtype)
