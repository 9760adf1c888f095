"""Gradients that several ranks of a tp group hold, and that data-parallel ranks have summed in no fixed order."""

from collections.abc import Sequence

from plait.config.run import RunConfig
from plait.contract.axis.fsdp import count_share
from plait.contract.collective import Collective
from plait.contract.model import ModelContract
from plait.contract.step import REDUCE
from plait.sharding import Ownership, StagePart

_COMMUTES = 2
"""Addends whose sum is the same in any order."""


def derive_replica_copies(run: RunConfig, contract: ModelContract, parts: Sequence[StagePart]) -> list[Collective]:
    """What makes them the same: one all-reduce over tp, and one over each subgroup that shares KV heads.

    Nothing where sums are of two addends at most.
    """
    shape, setting = run.parallel.mesh_shape, contract.setting
    shared = shape.degree("dp_shard_cp") if shape.dp_shard > 1 else 1
    summed = (shared, shape.dp_replicate) if shape.dp_shard > 1 else (shape.degree("dp_cp"),)
    if max(summed) <= _COMMUTES:
        return []
    held = {("tp", setting.tp): 0}
    for ownership in _list_parameters(contract, parts):
        axis = _find_holders(ownership, setting.tp, setting.rank)
        held[axis] = held.get(axis, 0) + count_share(ownership, setting.rank, shared)
    dtype = setting.statistics_dtype
    return [
        Collective(REDUCE, name, degree, (numel,), dtype)
        for (name, degree), numel in held.items()
        if degree > 1 and numel
    ]


def _list_parameters(contract: ModelContract, parts: Sequence[StagePart]) -> list[Ownership]:
    """Of the ends and of every block that stages have; a tied one once."""
    ends = [
        *(contract.entry if any(part.is_first for part in parts) else ()),
        *(contract.exit if any(part.is_last for part in parts) else ()),
    ]
    held = {p.ownership.name: p.ownership for op in ends for p in op.parameters}
    block = [p.ownership for op in contract.block for p in op.parameters]
    return [*held.values(), *block * sum(len(part.layers) for part in parts)]


def _find_holders(ownership: Ownership, tp: int, rank: int) -> tuple[str, int]:
    """The axis of the ranks that hold the same as `rank`, and how many they are."""
    if ownership.split is None:
        return "tp", tp
    return "tp/kv", len(ownership.split.replicas(rank))
