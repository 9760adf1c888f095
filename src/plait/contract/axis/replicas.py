"""Gradients that several ranks of a tp group hold, and that data-parallel ranks have summed in no fixed order."""

from collections.abc import Sequence

from plait.config.run import RunConfig
from plait.contract.axis.fsdp import count_share
from plait.contract.collective import Collective
from plait.contract.model import ModelContract
from plait.contract.pipeline.stage import list_parameters
from plait.contract.step import REDUCE
from plait.sharding import Ownership, StagePart

COMMUTES = 2
"""Addends whose sum is the same in any order."""


def derive_replica_copies(run: RunConfig, contract: ModelContract, parts: Sequence[StagePart]) -> list[Collective]:
    """What makes them the same: one all-reduce over tp, and one over each subgroup that shares KV heads.

    Nothing where sums are of two addends at most.
    """
    shape, setting = run.parallel.mesh_shape, contract.setting
    shared = shape.degree("dp_shard_cp") if shape.dp_shard > 1 else 1
    summed = (shared, shape.dp_replicate) if shape.dp_shard > 1 else (shape.degree("dp_cp"),)
    if max(summed) <= COMMUTES:
        return []
    held = {("tp", setting.tp): 0}
    for parameter in list_parameters(contract, parts):
        ownership = parameter.ownership
        axis = _find_holders(ownership, setting.tp, setting.rank)
        held[axis] = held.get(axis, 0) + count_share(ownership, setting.rank, shared)
    dtype = setting.statistics_dtype
    return [
        Collective(REDUCE, name, degree, (numel,), dtype)
        for (name, degree), numel in held.items()
        if degree > 1 and numel
    ]


def _find_holders(ownership: Ownership, tp: int, rank: int) -> tuple[str, int]:
    """The axis of the ranks that hold the same as `rank`, and how many they are."""
    if ownership.split is None:
        return "tp", tp
    return "tp/kv", len(ownership.split.replicas(rank))
