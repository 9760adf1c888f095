"""Where a collective GEMM sits in a model, how much it computes and moves per row, and a pass through it."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from plait.config.recipe import Recipe
from plait.contract.quantization import count_row_bytes
from plait.dtype import DType, width_bytes
from plait.schedule.step import Content
from plait.schedule.work import Operation, Work
from plait.sharding import Transition

Region = Literal["attention", "mlp", "head"]


@dataclass(frozen=True)
class Precision:
    """How the linears of a site are quantized.

    Attributes:
        kernel: what multiplies: an instruction of the device, or its emulation.
        reason: why that.
    """

    recipe: Recipe
    kernel: str
    reason: str

    @property
    def name(self) -> str:
        """Of the recipe."""
        return self.recipe.name


@dataclass(frozen=True)
class Site:
    """One linear, or the linears of one gather group.

    Attributes:
        label: its name in traces and receipts.
        width: features of the tensor that moves.
        features: of the rank that has most, on the other side, of all linears of the group together.
        dtype: of the operands and of what is gathered.
        reduce_dtype: in which sums over ranks are carried; `dtype` unless given.
        precision: of linears that are quantized: what is gathered is so before.
    """

    label: str
    region: Region
    width: int
    features: int
    dtype: DType
    reduce_dtype: DType | None = None
    precision: Precision | None = None

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

    def gathered_row_bytes(self, work: Work) -> int:
        """What a row of what `work` gathers weighs: numbers and scales as the GEMMs read them that multiply it."""
        if self.precision is None or work.gather is None:
            return self.row_bytes(Content.VALUE)
        recipe = self.precision.recipe
        if work.gather.tensor == "dy":
            return count_row_bytes(recipe.gradient, work.gemms, self.width)
        return count_row_bytes(recipe.input, ("forward" if work.rowwise == "forward" else "wgrad",), self.width)


@dataclass(frozen=True)
class Pass:
    """One pass through one linear: what decides its schedule.

    Attributes:
        transition: the boundary's row of the table of transitions.
        num_rows: T, of all ranks.
        unit: how many of them stay together.
        needs_dgrad: of a backward, whether the input's gradient is wanted.
        needs_wgrad: of a backward, whether a weight's is.
        can_be_fused: whether a fused operation can do it; the same linear may once have a reader more than before.
    """

    operation: Operation
    site: Site
    transition: Transition
    num_rows: int
    needs_dgrad: bool = True
    needs_wgrad: bool = True
    can_be_fused: bool = True
    unit: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Made once and looked up in every run; of a small block's step, hashing eight of them took a fiftieth.
        object.__setattr__(self, "_hash", hash(self._given))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        # In another process strings have other hashes.
        return type(self), self._given

    @property
    def _given(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self) if each.init)
