"""What stages of a pipeline send each other."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from plait.dtype import DType, width_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor from a stage to a neighbour, on the rank that sends it or on the one that receives it.

    An activation goes to the stage behind, its gradient to the one before.
    """

    direction: Literal["sent", "received"]
    tensor: Literal["activation", "gradient"]
    source: int
    target: int
    micro_batch: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """What travels."""
        return prod(self.shape) * width_bytes(self.dtype)

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        where = f"from stage {self.source} to {self.target}"
        return f"{self.tensor} [{size}] {self.dtype} of micro-batch {self.micro_batch} {where}, {self.direction}"
