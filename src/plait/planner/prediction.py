"""What a prediction says: time with its interval, memory with its verdict, what binds, and from which constants."""

from dataclasses import dataclass
from enum import StrEnum

from plait.config.model import ModelConfig
from plait.planner.assumed import (
    CONTEXT_BYTES,
    FUSED_LOGIT_BYTES,
    LIBRARY_BYTES,
    LOGIT_BYTES,
    MEMORY_MARGIN,
    find_constants,
)
from plait.planner.cluster import Cluster
from plait.planner.cost import COMPUTE, Cost, Kind
from plait.planner.hardware.constant import Constant
from plait.planner.plan_config import PlanConfig
from plait.units import format_bytes


class Verdict(StrEnum):
    """Whether a plan's worst rank has room."""

    FITS = "fits"
    TIGHT = "tight"
    """It is predicted to have room, but by less than the prediction may be wrong."""
    DOES_NOT_FIT = "does not fit"


class MemoryPart(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    """Master weights and both moments, in float32."""
    ACTIVATIONS = "activations"
    """What the blocks keep for backward, of all micro-batches in flight."""
    ENDS = "ends"
    """What embedding, final norm and loss keep, with the logits."""
    BUFFERS = "buffers"
    """What a layer needs for as long as it runs: gathered inputs and parameters, gradients of activations."""
    LIBRARIES = "libraries"
    """The context of the device and the buffers of its collectives: not what an allocator counts."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the worst rank, by what they are for.

    Attributes:
        capacity_bytes: of one device.
        stage: which rank of the pipeline is the worst.
    """

    parts: tuple[tuple[MemoryPart, float], ...]
    capacity_bytes: float
    stage: int
    verdict: Verdict
    margin_bytes: float
    """What is left of the capacity; where it is negative, what is lacking."""

    @property
    def total_bytes(self) -> float:
        """Everything that takes room on the device."""
        return sum(size for _, size in self.parts)

    @property
    def static_bytes(self) -> float:
        """Parameters, gradients and optimizer state: what is there between steps."""
        static = (MemoryPart.PARAMETERS, MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER)
        return sum(self.bytes_of(part) for part in static)

    @property
    def allocated_bytes(self) -> float:
        """The most that the framework's allocator has given out: everything but what libraries take beside it."""
        return self.total_bytes - self.bytes_of(MemoryPart.LIBRARIES)

    def bytes_of(self, part: MemoryPart) -> float:
        """Those for one purpose."""
        return next((size for name, size in self.parts if name is part), 0.0)


@dataclass(frozen=True, slots=True)
class Binding:
    """What would have to be better for the step to be shorter.

    Attributes:
        term: `compute`, `memory bandwidth`, `pipeline bubble`, ..., or `memory` where the plan does not fit.
        share: of the step, or of the capacity.
    """

    term: str
    share: float
    reason: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's step on a cluster.

    Attributes:
        step: the tree of costs of one optimizer step.
        model_flops: FLOPs of one step on all devices that a model without recompute needs (causal attention: half).
        weak: why this prediction deserves less trust than its interval says, if it does.
    """

    model: ModelConfig
    cluster: Cluster
    plan: PlanConfig
    seq_len: int
    global_batch: int
    step: Cost
    memory: Memory
    model_flops: float
    peak_flops_per_s: float
    weak: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.step.seconds

    @property
    def binding(self) -> Binding:
        """Memory if it does not fit, else what most of the step is spent on."""
        if self.memory.verdict is Verdict.DOES_NOT_FIT:
            share = self.memory.total_bytes / self.memory.capacity_bytes
            return Binding("memory", share, f"the worst rank lacks {format_bytes(-self.memory.margin_bytes)}")
        by_kind = self.step.sum_by_kind()
        seconds = {term: sum(by_kind[kind] for kind in kinds) for term, kinds in _TERMS.items()}
        term = max(seconds, key=lambda name: seconds[name])
        share = seconds[term] / self.step_s
        return Binding(term, share, f"{share:.0%} of the step")

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Everything that the prediction depends on, with its provenance."""
        logit_bytes = FUSED_LOGIT_BYTES if self.plan.loss == "fused" else LOGIT_BYTES
        found = find_constants(self.step.list_constants(), self.cluster.hardware)
        return (*found, logit_bytes, LIBRARY_BYTES, CONTEXT_BYTES, MEMORY_MARGIN)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Between which the step lies if every constant is as uncertain as it is said to be."""
        return self.step.low_s, self.step.high_s

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.global_batch * self.seq_len / self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Of one device."""
        return self.tokens_per_s / self.plan.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, against the datasheet's dense rate of the format that GEMMs are computed in."""
        return self.model_flops / (self.step_s * self.plan.num_devices * self.peak_flops_per_s)

    @property
    def compute_s(self) -> float:
        """GEMMs, attention and memory-bound kernels."""
        by_kind = self.step.sum_by_kind()
        return sum(by_kind[kind] for kind in COMPUTE)

    @property
    def exposed_communication_s(self) -> float:
        """Of tp, cp and pp, as far as nothing hides it."""
        return self.step.sum_by_kind()[Kind.COMMUNICATION]

    @property
    def bubble_s(self) -> float:
        """How long a pipeline's rank has nothing to do."""
        return self.step.sum_by_kind()[Kind.BUBBLE]

    @property
    def data_parallel_s(self) -> float:
        """Of summing gradients and gathering parameters, as far as nothing hides it."""
        return self.step.sum_by_kind()[Kind.DATA_PARALLEL]

    @property
    def optimizer_s(self) -> float:
        """The update, once a step."""
        return self.step.sum_by_kind()[Kind.OPTIMIZER]

    @property
    def head_s(self) -> float:
        """Final norm, head and loss, all micro-batches, forward and backward; part of compute and communication."""
        return sum(node.seconds * times for node, times in self.step.walk() if node.name == HEAD)


_TERMS: dict[str, tuple[Kind, ...]] = {
    "compute": (Kind.GEMM, Kind.ATTENTION),
    "memory bandwidth": (Kind.MEMORY_BOUND, Kind.OPTIMIZER),
    "communication of tp, cp and pp": (Kind.COMMUNICATION,),
    "pipeline bubble": (Kind.BUBBLE,),
    "communication of dp": (Kind.DATA_PARALLEL,),
}

HEAD = "head"
"""The name of the nodes that hold norm, head and loss."""
