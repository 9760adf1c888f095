"""What one operation promises one rank: layouts, parameters, steps forward and backward, tensors kept for backward."""

from dataclasses import dataclass
from math import prod

from plait.config.recipe import Recipe
from plait.contract.parameter import Parameter
from plait.contract.setting import Tensor
from plait.contract.step import Gemm, Step
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
    again: tuple[Step, ...] = ()
    """Steps of forward that are taken a second time before backward, as their results were not kept."""
    recipe: Recipe | None = None
    """How what its GEMMs read is quantized."""

    @property
    def is_attention(self) -> bool:
        """Whether it is the core of attention: it multiplies, but by no weights."""
        return not self.parameters and any(isinstance(step, Gemm) for step in self.forward)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for backward."""
        return sum(saved.num_bytes for saved in self.saved)
