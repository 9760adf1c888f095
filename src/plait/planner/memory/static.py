"""Parameters, gradients and optimizer state: what is there between steps."""

from plait.dtype import width_bytes
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import PlannedModel
from plait.planner.prediction import MemoryPart
from plait.planner.stages import Stage

_MOMENTS_BYTES = 8
_MASTER_BYTES = 4


def count_stage_parameters(contract: PlannedModel, stage: Stage) -> int:
    """Elements of the parameters of a stage; a tied table is on both ends of a pipeline."""
    if stage.is_first and stage.is_last:
        ends = contract.both_ends_parameters
    else:
        ends = contract.entry_parameters * stage.is_first + contract.exit_parameters * stage.is_last
    return stage.num_layers * contract.block_parameters + ends


def derive_static(contract: PlannedModel, plan: PlanConfig, stage: Stage) -> dict[MemoryPart, float]:
    """Bytes by part; weights of another format than float32 have a float32 master beside them."""
    numel, shards = count_stage_parameters(contract, stage), plan.sharding_degree
    master = 0 if plan.precision.compute == "float32" else _MASTER_BYTES
    parameters = numel / (shards if plan.cuts("parameters") else 1)
    gradients = numel / (shards if plan.cuts("gradients") else 1)
    return {
        MemoryPart.PARAMETERS: parameters * width_bytes(plan.precision.compute),
        MemoryPart.GRADIENTS: gradients * width_bytes(plan.gradient_dtype),
        MemoryPart.OPTIMIZER: numel * (master + _MOMENTS_BYTES) / shards,
    }


def derive_gathered_bytes(contract: PlannedModel, plan: PlanConfig, stage: Stage) -> float:
    """What is whole for a moment of what is cut.

    Parameters of two blocks, one computed and one on its way, and gradients of one before they are summed and cut.
    """
    if plan.sharding_degree == 1 or not plan.cuts("gradients"):
        return 0.0
    numel = contract.block_parameters
    gathered = min(2, stage.num_layers) * numel * width_bytes(plan.precision.compute)
    return numel * width_bytes(plan.gradient_dtype) + (gathered if plan.cuts("parameters") else 0)
