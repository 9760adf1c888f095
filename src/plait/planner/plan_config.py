"""What a plan decides: degrees, recompute, overlap, precision, and who keeps which part of the optimizer state."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, get_args

from plait.config.axis.context import ContextConfig, ContextMethodName
from plait.config.axis.pipeline import PipelineConfig, Schedule
from plait.config.overlap import OverlapConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import FloatFormat, PrecisionConfig
from plait.config.quantization import QuantizationConfig
from plait.config.recipe import RECIPES, Recipe, RecipeName
from plait.config.train import Recompute
from plait.contract.pipeline.order import Pipeline
from plait.sharding import MeshShape

Quantization = Literal[RecipeName, "fp8_rowwise"]
"""In which form GEMMs of linears in blocks read their operands: a recipe of a run, or a scale for each row, which only
published runs have."""

Sharded = Literal["nothing", "optimizer", "gradients", "parameters"]
"""What the ranks of `dp_shard` and `cp` share out: the optimizer state, also gradients, also parameters (FSDP)."""

Axis = Literal["tp", "cp", "dp_shard", "dp_replicate", "pp"]

ORDER: tuple[Axis, ...] = get_args(Axis)
"""From ranks that are neighbours to those farthest apart: what moves most is closest."""

_STAGES: tuple[Sharded, ...] = get_args(Sharded)

PlannedSchedule = Literal["1f1b", "interleaved", "zero_bubble"]
"""How micro-batches go through a pipeline; of the first two it is the one that so many chunks a rank make it."""

Loss = Literal["in_place", "fused"]
"""How cross entropy treats its logits: in place, or in kernels that a compiler fused, which take more memory."""

_WHERE_IT_PAYS = OverlapConfig(policy="auto")
_BFLOAT16 = PrecisionConfig()


class Missing(NamedTuple):
    """Something of a plan that `plait train` does not run.

    Attributes:
        fields: of the plan; another value of one of them would do.
    """

    text: str
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """How a model is spread over `tp * cp * pp * dp_replicate * dp_shard` devices, and how it is run there.

    Attributes:
        context_method: how queries and keys of the ranks of `cp` meet, which have their tokens in zigzag order.
        interleave: stages of the pipeline that one rank holds, its chunks.
        dp_replicate: groups that hold the same and only sum gradients.
        dp_shard: data-parallel ranks of a group that share out what `sharded` says.
        micro_batch: sequences of one forward and backward of one data-parallel rank.
        fused_attention: whether attention scores stay on the chip (FlashAttention).
        gradient_dtype: in which gradients are accumulated and summed over dp; unless given, as a run does it:
            accumulated in float32, summed in the format of all sums.
        overlaps_gradients: whether gradients are summed over dp beneath the backward of other layers.
        overlaps_sends: whether what a pipeline sends travels beneath the chunk that is computed next.
    """

    tp: int = 1
    sequence_parallel: bool = True
    cp: int = 1
    context_method: ContextMethodName = "ring"
    pp: int = 1
    interleave: int = 1
    schedule: PlannedSchedule = "1f1b"
    dp_replicate: int = 1
    dp_shard: int = 1
    sharded: Sharded = "optimizer"
    micro_batch: int = 1
    recompute: Recompute = "none"
    overlap: OverlapConfig = _WHERE_IT_PAYS
    precision: PrecisionConfig = _BFLOAT16
    quantization: Quantization = "none"
    fused_attention: bool = True
    gradient_dtype: FloatFormat | None = None
    overlaps_gradients: bool = True
    overlaps_sends: bool = True
    loss: Loss = "in_place"

    def __post_init__(self) -> None:
        if self.schedule != "zero_bubble":
            object.__setattr__(self, "schedule", "1f1b" if self.interleave == 1 else "interleaved")

    @property
    def dp(self) -> int:
        """Data-parallel degree: ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> int:
        """Devices that the plan takes."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def sharding_degree(self) -> int:
        """Ranks over which the optimizer state is cut."""
        return 1 if self.sharded == "nothing" else self.dp_shard * self.cp

    @property
    def kept_dtype(self) -> FloatFormat:
        """In which gradients are accumulated."""
        return self.gradient_dtype or "float32"

    @property
    def summed_dtype(self) -> FloatFormat:
        """In which they are summed over data-parallel ranks."""
        return self.gradient_dtype or self.precision.reduce_dtype

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of these degrees: `dp_shard` of a run is of ranks that share the parameters out."""
        replicate, shard = (self.dp_replicate, self.dp_shard) if self.sharded == "parameters" else (self.dp, 1)
        return MeshShape(pp=self.pp, dp_replicate=replicate, dp_shard=shard, cp=self.cp, tp=self.tp)

    @property
    def parallel(self) -> ParallelConfig:
        """The section of the run's config; what a run has no field for, or cannot do, is in `list_missing`."""
        shape = self.mesh_shape
        return ParallelConfig(
            tp=self.tp, cp=self.cp, dp_shard=shape.dp_shard, dp_replicate=shape.dp_replicate, pp=self.pp,
            sequence_parallel=self.sequence_parallel,
        )  # fmt: skip

    @property
    def context(self) -> ContextConfig:
        """The section of the run's config."""
        return ContextConfig(method=self.context_method)

    def find_schedule(self, num_micro_batches: int) -> Schedule:
        """That of a run: with fewer micro-batches than ranks nothing is left of 1f1b but its forwards."""
        return "gpipe" if self.schedule == "1f1b" and num_micro_batches < self.pp else self.schedule

    def build_order(self, num_micro_batches: int) -> Pipeline:
        """In which order the ranks of the pipeline work."""
        return Pipeline(self.find_schedule(num_micro_batches), self.pp, self.interleave, num_micro_batches)

    def build_pipeline(self, num_micro_batches: int) -> PipelineConfig:
        """The section of a run."""
        schedule = self.find_schedule(num_micro_batches)
        if self.schedule == "1f1b":
            return PipelineConfig(schedule=schedule)
        return PipelineConfig(schedule=schedule, stages_per_rank=self.interleave)

    @property
    def recipe(self) -> Recipe | None:
        """How linears in blocks are quantized; with a scale for each row they weigh what they do with one of all."""
        return RECIPES.get("fp8_currentscaling" if self.quantization == "fp8_rowwise" else self.quantization)

    @property
    def gemm_dtype(self) -> str:
        """By the law of which number format linears in blocks are timed."""
        if self.recipe is None:
            return self.precision.compute
        return "float4" if self.recipe.input.format == "e2m1" else "float8"

    @property
    def section(self) -> QuantizationConfig:
        """The section of a run in which every block is quantized, as every block is timed."""
        return build_section(self.quantization)

    def list_missing(self, *, compiled: bool = False) -> tuple[Missing, ...]:
        """What of this plan `plait train` does not run, or not with blocks `compiled`: what a run's config refuses."""
        missing = []
        if self.quantization == "fp8_rowwise":
            missing.append(Missing("quantization = fp8_rowwise", ("quantization",)))
        if self.cp > 1 and self.recipe is not None:
            text = f"quantization = {self.quantization} over cp = {self.cp}"
            missing.append(Missing(text, ("quantization", "cp")))
        if self.sharding_degree > 1 and self.sharded != "parameters":
            missing.append(Missing(f"{self.sharded} sharded over dp", ("sharded",)))
        elif self.sharding_degree > 1 and self.dp_shard == 1:
            missing.append(Missing("parameters sharded over cp alone", ("sharded",)))
        if compiled:
            missing += self._list_uncompiled()
        return tuple(missing)

    def _list_uncompiled(self) -> list[Missing]:
        asked: dict[str, str] = {"quantization": self.quantization, "recompute": self.recompute}
        if self.schedule == "zero_bubble":
            asked["schedule"] = self.schedule
        missing = [
            Missing(f"{name} = {value} of compiled blocks", (name,)) for name, value in asked.items() if value != "none"
        ]
        return [*missing, *([Missing(f"cp = {self.cp} with compiled blocks", ("cp",))] if self.cp > 1 else [])]

    def cuts(self, what: Sharded) -> bool:
        """Whether the optimizer state, the gradients or the parameters are shared out; each implies those before."""
        return _STAGES.index(self.sharded) >= _STAGES.index(what)

    @property
    def gathers_units(self) -> bool:
        """Whether parameters are shared out, so that each block is gathered, and its gradients are reduced (FSDP)."""
        return self.sharded == "parameters" and self.sharding_degree > 1

    def stride(self, axis: Axis) -> int:
        """How many devices lie between neighbours on `axis`."""
        return prod(getattr(self, other) for other in ORDER[: ORDER.index(axis)])

    def num_micro_batches(self, global_batch: int) -> int:
        """Forwards and backwards of each data-parallel rank in one step; the batch must divide."""
        return global_batch // (self.dp * self.micro_batch)


@lru_cache
def build_section(quantization: Quantization) -> QuantizationConfig:
    """The section of a run in which every block is quantized; nothing is where no run has the recipe."""
    if quantization == "fp8_rowwise":
        return QuantizationConfig()
    return QuantizationConfig(recipe=quantization, keep_first=0, keep_last=0)


def keep_layer_axes(plan: PlanConfig, *, dp_replicate: int = 1) -> PlanConfig:
    """The plan as one layer sees it: without what only pipeline, data parallelism and optimizer depend on."""
    return replace(
        plan, pp=1, interleave=1, schedule="1f1b", dp_replicate=dp_replicate, dp_shard=1, sharded="nothing",
        gradient_dtype=None, overlaps_gradients=True, overlaps_sends=True,
    )  # fmt: skip
