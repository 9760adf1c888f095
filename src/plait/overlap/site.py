"""Where a collective GEMM sits in a model, and how much it computes and moves per row."""

from dataclasses import dataclass
from typing import Literal

from plait.dtype import DType, width_bytes
from plait.schedule.step import Content

Region = Literal["attention", "mlp", "head"]


@dataclass(frozen=True)
class Site:
    """One linear, or the linears of one gather group.

    Attributes:
        label: its name in traces and receipts.
        width: features of the tensor that moves.
        features: of the rank that has most, on the other side, of all linears of the group together.
        dtype: of the operands and of what is gathered.
        reduce_dtype: in which sums over ranks are carried; `dtype` unless given.
    """

    label: str
    region: Region
    width: int
    features: int
    dtype: DType
    reduce_dtype: DType | None = None

    @property
    def flops_per_row(self) -> int:
        """Of each GEMM: forward, dgrad and wgrad alike."""
        return 2 * self.width * self.features

    @property
    def sum_dtype(self) -> DType:
        """In which sums are carried."""
        return self.dtype if self.reduce_dtype is None else self.reduce_dtype

    def row_bytes(self, content: Content) -> int:
        """What a row weighs on its way: addends travel in the dtype in which they are summed."""
        return self.width * width_bytes(self.sum_dtype if content is Content.ADDEND else self.dtype)
