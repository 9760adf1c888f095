"""Under which circumstances a rank works, and the tensors it then sees."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from plait.config.recipe import Recipe
from plait.contract.context.attention import ContextMethod
from plait.contract.context.sequences import Sequences
from plait.contract.plan import derive_activation_placement
from plait.dtype import DType
from plait.sharding import Layout, Placement, Shard, Split, build_split, build_token_split

if TYPE_CHECKING:  # a linear is explained without pydantic, whose import takes longer
    from plait.config.quantization import QuantizationConfig
    from plait.config.train import Recompute


@dataclass(frozen=True)
class Tensor:
    """An input or output of an operation and its layout."""

    name: str
    layout: Layout


@dataclass(frozen=True)
class Setting:
    """How many tokens a rank works on, at which degree, in which mode and number formats.

    Sums over ranks are carried in `reduce_dtype`, or in `dtype` where it is None.

    Attributes:
        is_calibrated: whether delayed scaling has a history to look back at, as it has from the second step on.
        seq_len: of whole sequences, also where they are cut over a context axis.
        recompute: what backward computes again.
        sequences: how they are cut over a context axis, and what sees what; None where they are whole.
        context_method: how queries and keys of different context ranks meet.
    """

    batch: int
    seq_len: int
    tp: int = 1
    rank: int = 0
    sequence_parallel: bool = True
    dtype: DType = "bfloat16"
    reduce_dtype: DType | None = None
    quantization: "QuantizationConfig | None" = None
    is_calibrated: bool = True
    recompute: "Recompute" = "none"
    sequences: Sequences | None = None
    context_method: ContextMethod = ContextMethod.RING

    @property
    def num_tokens(self) -> int:
        """T: tokens of one (dp, cp) coordinate in one forward and backward."""
        return self.batch * self.num_own_tokens

    @property
    def num_own_tokens(self) -> int:
        """Tokens of each sequence that the rank has."""
        return self.seq_len if self.sequences is None else self.sequences.num_own

    @property
    def sum_dtype(self) -> DType:
        """In which format sums over ranks are carried."""
        return self.reduce_dtype or self.dtype

    @property
    def statistics_dtype(self) -> DType:
        """In which format norms and the statistics of a loss are kept and summed."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def recipe(self) -> Recipe | None:
        """How linears are quantized that are: as long as nothing is known of earlier steps, by current scales."""
        recipe = None if self.quantization is None else self.quantization.resolved
        return recipe if recipe is None or self.is_calibrated else recipe.uncalibrated

    @cached_property
    def token_split(self) -> Split:
        """How the tokens are cut over tp between the parallel regions, under sequence parallelism."""
        return build_token_split(self.num_tokens, self.tp, self.recipe.token_unit if self.recipe else 1)

    @property
    def activation(self) -> Placement:
        """State of the activations between the parallel regions."""
        return derive_activation_placement(sequence_parallel=self.sequence_parallel)

    def build_tensor(
        self, name: str, feature: str, width: int, placement: Placement, split: Split | None = None
    ) -> Tensor:
        """Tensor `[T, feature]`; `split` says how the features are cut where they are (default: in single columns)."""
        cut = None
        if isinstance(placement, Shard):
            cut = (self.token_split, split or build_split(width, self.tp))[placement.dim]
        return Tensor(name, Layout(("T", feature), (self.num_tokens, width), placement, cut))
