"""What every rank of a plan needs, where `Prediction.memory` tells of the worst one."""

from dataclasses import dataclass
from itertools import groupby

from plait.planner.memory.peak import derive_layer_bytes, derive_stage_parts
from plait.planner.planned import derive_planned_model
from plait.planner.prediction import MemoryPart, Prediction
from plait.planner.stages import Stage, list_stages


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of ranks that need the same: of one stage of the pipeline, and tp ranks `first` to `last`."""

    stage: int
    first: int
    last: int
    parts: dict[MemoryPart, float]


def list_rank_memory(prediction: Prediction) -> list[RankMemory]:
    """All ranks that differ, by stage and tp rank; those of dp and cp are alike."""
    plan, num_layers = prediction.plan, prediction.model.num_layers
    micro_batches = plan.num_micro_batches(prediction.global_batch)
    stages = list_stages(num_layers, plan, micro_batches)
    return [each for stage in stages for each in _list_tp_ranks(prediction, stage)]


def _list_tp_ranks(prediction: Prediction, stage: Stage) -> list[RankMemory]:
    of_rank = [_derive_parts(prediction, stage, rank) for rank in range(prediction.plan.tp)]
    alike = [(parts, list(group)) for parts, group in groupby(range(len(of_rank)), key=lambda rank: of_rank[rank])]
    return [RankMemory(stage.index, group[0], group[-1], parts) for parts, group in alike]


def _derive_parts(prediction: Prediction, stage: Stage, rank: int) -> dict[MemoryPart, float]:
    contract = derive_planned_model(prediction.model, prediction.plan, prediction.seq_len, rank=rank)
    return derive_stage_parts(contract, prediction.plan, stage, derive_layer_bytes(contract, prediction.plan))
