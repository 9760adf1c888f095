"""One collective, as promised by a contract or as recorded when it was issued."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from plait.dtype import DType, width_bytes
from plait.sharding import Kind

ReduceOp = Literal["sum", "max"]


@dataclass(frozen=True)
class Collective:
    """A collective over one axis of the mesh.

    `shape` is that of the whole tensor: the reduced one, the gathered one, or the one that is scattered.
    """

    kind: Kind
    axis: str
    degree: int
    shape: tuple[int, ...]
    dtype: DType
    dim: int = 0
    op: ReduceOp = "sum"

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * width_bytes(self.dtype)

    @property
    def wire_bytes_per_rank(self) -> float:
        """Bytes each rank has to send at least: (p-1)/p of the payload, twice that for an all-reduce.

        Of an all-to-all a rank has only its own shard to send.
        """
        passes = {Kind.ALL_REDUCE: 2, Kind.ALL_TO_ALL: 1 / self.degree}.get(self.kind, 1)
        return passes * self.payload_bytes * (self.degree - 1) / self.degree

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        op = "" if self.op == "sum" else f"{self.op} "
        return f"{self.kind} {op}[{size}] {self.dtype} over {self.axis}"
