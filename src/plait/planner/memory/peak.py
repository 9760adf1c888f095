"""The most memory that any rank of a plan needs, and whether a device has it."""

from dataclasses import dataclass
from functools import lru_cache

from plait.config.model import ModelConfig
from plait.planner.assumed import CONTEXT_BYTES, LIBRARY_BYTES, MEMORY_MARGIN
from plait.planner.memory.activations import (
    derive_block_bytes,
    derive_ends_bytes,
    derive_half_bytes,
    derive_logit_bytes,
    derive_moving_bytes,
    derive_running_bytes,
)
from plait.planner.memory.static import derive_gathered_bytes, derive_static
from plait.planner.plan_config import PlanConfig, keep_layer_axes
from plait.planner.planned import PlannedModel, derive_planned_model
from plait.planner.prediction import Memory, MemoryPart, Verdict
from plait.planner.stages import Stage, list_stages


@lru_cache(maxsize=65536)
def predict_memory(
    model: ModelConfig, plan: PlanConfig, seq_len: int, num_micro_batches: int, capacity_bytes: float
) -> Memory:
    """Memory of the rank of the pipeline that needs most."""
    contract = derive_planned_model(model, plan, seq_len)
    layer = _derive_most_layer_bytes(model, keep_layer_axes(plan), seq_len)
    stages = list_stages(model.num_layers, plan, num_micro_batches)
    parts, stage = max(
        ((derive_stage_parts(contract, plan, stage, layer), stage) for stage in _list_candidates(stages)),
        key=lambda pair: sum(pair[0].values()),
    )
    total = sum(parts.values())
    return Memory(
        tuple(parts.items()), capacity_bytes, stage.index, judge(total, capacity_bytes), capacity_bytes - total
    )


def _list_candidates(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Later ones have less in flight, so between the ends only the second can be the worst."""
    few = [stages[0], stages[min(1, len(stages) - 1)], stages[-1]]
    if stages[-1].halves:
        # With zero bubble later ones have as much in flight, and more of it half-way: of each size the last counts.
        few += {stage.num_layers: stage for stage in stages[:-1]}.values()
    return tuple(dict.fromkeys(few))


def judge(total_bytes: float, capacity_bytes: float) -> Verdict:
    """It fits if it would even if the prediction were as wrong as predictions are."""
    if total_bytes > capacity_bytes:
        return Verdict.DOES_NOT_FIT
    is_safe = total_bytes * MEMORY_MARGIN.value + CONTEXT_BYTES.value < capacity_bytes
    return Verdict.FITS if is_safe else Verdict.TIGHT


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What is the same on every stage: what a block keeps, also half-way through its backward, room of what moves, and
    what a running block needs.
    """

    block: float
    half: float
    moving: float
    running: float


def derive_layer_bytes(contract: PlannedModel, plan: PlanConfig) -> LayerBytes:
    """That of one tp rank, whose contract this is."""
    return LayerBytes(
        derive_block_bytes(contract, plan),
        derive_half_bytes(contract),
        derive_moving_bytes(contract, plan),
        derive_running_bytes(contract, plan),
    )


@lru_cache(maxsize=4096)
def _derive_most_layer_bytes(model: ModelConfig, plan: PlanConfig, seq_len: int) -> LayerBytes:
    return derive_layer_bytes(derive_planned_model(model, plan, seq_len), plan)


def derive_stage_parts(
    contract: PlannedModel, plan: PlanConfig, stage: Stage, layer: LayerBytes
) -> dict[MemoryPart, float]:
    """Bytes of one tp rank of one stage, by what they are for."""
    logit_bytes = derive_logit_bytes(contract, plan) if stage.is_last else 0.0
    gathered_bytes = derive_gathered_bytes(contract, plan, stage)
    return derive_static(contract, plan, stage) | {
        MemoryPart.ACTIVATIONS: stage.num_layers * (stage.in_flight * layer.block + stage.halves * layer.half),
        MemoryPart.ENDS: derive_ends_bytes(contract, plan, stage),
        MemoryPart.BUFFERS: layer.moving + max(0.0, layer.running - logit_bytes) + gathered_bytes,
        MemoryPart.LIBRARIES: LIBRARY_BYTES.value,
    }
