"""Parameters, gradients and optimizer state: what is there between steps, or for as long as one lasts."""

from plait.dtype import width_bytes
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import PlannedModel
from plait.planner.prediction import MemoryPart
from plait.planner.stages import Stage

_MOMENTS_BYTES = 8
_MASTER_BYTES = 4


def count_stage_parameters(contract: PlannedModel, stage: Stage) -> int:
    """Elements of the parameters of a stage; a tied table is on both ends of a pipeline."""
    return stage.num_layers * contract.block_parameters + _count_ends(contract, stage)


def _count_ends(contract: PlannedModel, stage: Stage) -> int:
    if stage.is_first and stage.is_last:
        return contract.both_ends_parameters
    return contract.entry_parameters * stage.is_first + contract.exit_parameters * stage.is_last


def derive_static(contract: PlannedModel, plan: PlanConfig, stage: Stage) -> dict[MemoryPart, float]:
    """Bytes by part; weights of another format than float32 have a float32 master beside them.

    Where parameters are shared out the shards are the masters. What is around the blocks is whole from forward to
    backward, and gradients are from the first micro-batch to the last, if there are several. Stages of a pipeline are
    whole, parameters and gradients, until the step is over.
    """
    numel, shards = count_stage_parameters(contract, stage), plan.sharding_degree
    has_master = plan.gathers_units or plan.precision.compute != "float32"
    parameters, gradients = float(numel), numel / (shards if plan.cuts("gradients") else 1)
    if plan.gathers_units:
        parameters = numel if plan.pp > 1 else _count_ends(contract, stage)
        gradients = numel if _keeps_gradients(plan, stage) else numel / shards
    return {
        MemoryPart.PARAMETERS: parameters * width_bytes(plan.precision.compute),
        MemoryPart.GRADIENTS: gradients * width_bytes(plan.kept_dtype),
        MemoryPart.OPTIMIZER: numel * (_MASTER_BYTES * has_master + _MOMENTS_BYTES) / shards,
    }


def derive_gathered_bytes(contract: PlannedModel, plan: PlanConfig, stage: Stage) -> float:
    """What is whole for a moment of what is cut.

    Parameters of two blocks, one computed and one on its way, and gradients of one before they are summed and cut. Of a
    single micro-batch those of the last stage's end are there until backward has come to the embedding.
    """
    if plan.sharding_degree == 1 or not plan.cuts("gradients") or (plan.gathers_units and plan.pp > 1):
        return 0.0
    width, numel = width_bytes(plan.precision.compute), contract.block_parameters
    gradients = numel * width_bytes(plan.kept_dtype)
    if not plan.gathers_units:
        return gradients
    ends = 0 if _keeps_gradients(plan, stage) else contract.exit_parameters
    return gradients + (min(2, stage.num_layers) * numel + ends) * width


def _keeps_gradients(plan: PlanConfig, stage: Stage) -> bool:
    """Whether gradients of all that tp left are added up before data-parallel ranks sum them."""
    return plan.pp > 1 or stage.num_micro_batches > 1
