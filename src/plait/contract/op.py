"""What one operation promises one rank: layouts, parameters, steps forward and backward, tensors kept for backward."""

from dataclasses import dataclass
from math import prod

from plait.config.recipe import Recipe
from plait.contract.parameter import Parameter
from plait.contract.setting import Tensor
from plait.contract.step import Step
from plait.dtype import DType, width_bytes


@dataclass(frozen=True)
class Saved:
    """A tensor that one rank keeps from forward for backward."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * width_bytes(self.dtype)


@dataclass(frozen=True)
class Op:
    """One operation on one rank; steps are in the order of issue."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...] = ()
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    saved: tuple[Saved, ...] = ()
    recipe: Recipe | None = None
    """How what its GEMMs read is quantized."""

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for backward."""
        return sum(saved.num_bytes for saved in self.saved)
