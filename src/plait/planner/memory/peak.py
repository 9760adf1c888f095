"""The most memory that any rank of a plan needs, and whether a device has it."""

from functools import lru_cache

from plait.config.model import ModelConfig
from plait.planner.assumed import CONTEXT_BYTES, LIBRARY_BYTES, MEMORY_MARGIN
from plait.planner.memory.activations import (
    derive_block_bytes,
    derive_ends_bytes,
    derive_logit_bytes,
    derive_moving_bytes,
    derive_running_bytes,
)
from plait.planner.memory.static import derive_gathered_bytes, derive_static
from plait.planner.plan_config import PlanConfig, keep_layer_axes
from plait.planner.planned import PlannedModel, derive_planned_model
from plait.planner.prediction import Memory, MemoryPart, Verdict
from plait.planner.stages import Stage, derive_stages


@lru_cache(maxsize=65536)
def predict_memory(
    model: ModelConfig, plan: PlanConfig, seq_len: int, num_micro_batches: int, capacity_bytes: float
) -> Memory:
    """Memory of the rank of the pipeline that needs most."""
    contract = derive_planned_model(model, plan, seq_len)
    layer = _derive_layer_bytes(model, keep_layer_axes(plan), seq_len)
    stages = derive_stages(model.num_layers, plan.pp, plan.interleave, num_micro_batches)
    parts, stage = max(
        ((_derive_parts(contract, plan, stage, layer), stage) for stage in _list_candidates(stages)),
        key=lambda pair: sum(pair[0].values()),
    )
    total = sum(parts.values())
    return Memory(
        tuple(parts.items()), capacity_bytes, stage.index, judge(total, capacity_bytes), capacity_bytes - total
    )


def _list_candidates(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Later ones have less in flight, so between the ends only the second can be the worst."""
    return tuple(dict.fromkeys((stages[0], stages[min(1, len(stages) - 1)], stages[-1])))


def judge(total_bytes: float, capacity_bytes: float) -> Verdict:
    """It fits if it would even if the prediction were as wrong as predictions are."""
    if total_bytes > capacity_bytes:
        return Verdict.DOES_NOT_FIT
    is_safe = total_bytes * MEMORY_MARGIN.value + CONTEXT_BYTES.value < capacity_bytes
    return Verdict.FITS if is_safe else Verdict.TIGHT


@lru_cache(maxsize=4096)
def _derive_layer_bytes(model: ModelConfig, plan: PlanConfig, seq_len: int) -> tuple[float, float, float]:
    """What a block keeps, what moves have room of, and what a running block needs; the same on every stage."""
    contract = derive_planned_model(model, plan, seq_len)
    return (
        derive_block_bytes(contract, plan),
        derive_moving_bytes(contract, plan),
        derive_running_bytes(contract, plan),
    )


def _derive_parts(
    contract: PlannedModel, plan: PlanConfig, stage: Stage, layer: tuple[float, float, float]
) -> dict[MemoryPart, float]:
    block_bytes, moving_bytes, running_bytes = layer
    logit_bytes = derive_logit_bytes(contract) if stage.is_last else 0.0
    gathered_bytes = derive_gathered_bytes(contract, plan, stage)
    return derive_static(contract, plan, stage) | {
        MemoryPart.ACTIVATIONS: stage.num_layers * stage.micro_batches * block_bytes,
        MemoryPart.ENDS: derive_ends_bytes(contract, stage),
        MemoryPart.BUFFERS: moving_bytes + max(0.0, running_bytes - logit_bytes) + gathered_bytes,
        MemoryPart.LIBRARIES: LIBRARY_BYTES.value if plan.num_devices > 1 else 0.0,
    }
