"""Where a collective GEMM sits in a model, and how much it computes and moves per row."""

from dataclasses import dataclass
from typing import Literal

from plait.dtype import DType, width_bytes
from plait.schedule.step import Flow
from plait.sharding import Kind

Region = Literal["attention", "mlp", "head"]


@dataclass(frozen=True)
class Site:
    """One linear, or the linears of one gather group.

    Attributes:
        label: its name in traces and receipts.
        width: features of the tensor that moves.
        features: this rank's features on the other side, of all linears of the group together.
        dtype: of the operands and of what is gathered.
        reduce_dtype: in which sums are carried; `dtype` unless given.
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

    def row_dtype(self, flow: Flow) -> DType:
        """In what a row of `flow` travels."""
        return self.dtype if flow.kind is Kind.ALL_GATHER or self.reduce_dtype is None else self.reduce_dtype

    def row_bytes(self, flow: Flow) -> int:
        """What a row of `flow` weighs."""
        return self.width * width_bytes(self.row_dtype(flow))
