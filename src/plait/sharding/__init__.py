"""Layouts, ownership and transitions, without torch.

Letters, here and everywhere in plait:

    B batch    S sequence       T tokens of one dp coordinate (B*S)    D model width    F MLP width
    N query heads    K key/value heads    H head width    V vocabulary    L layers    tp, cp, dp, pp degrees

A local shape is written as a division, `[T/tp, D]`; an unreduced sum as `[T, D] partial(tp)`.
"""

from plait.sharding.cut import Columns, Cut, KeyValueHeads, QueryHeads
from plait.sharding.layout import Layout
from plait.sharding.mesh import AXES, COMBINED, MAX_CP, MAX_TP, Coordinates, MeshAxis, MeshShape, Partition, list_parts
from plait.sharding.ownership import (
    HeadSplits,
    Interval,
    Ownership,
    Split,
    build_chunks,
    build_head_splits,
    build_split,
    build_token_split,
    find_token_unit,
)
from plait.sharding.placement import (
    Invariant,
    Partial,
    Placement,
    Replicate,
    Shard,
    derive_gradient_placement,
)
from plait.sharding.redistribute import Kind, Transition, derive_transition, list_transitions
from plait.sharding.stages import (
    ENDS_AS_BLOCKS,
    StagePart,
    derive_parts,
    find_idle_stage,
    list_rank_stages,
    select_parts,
    share_layers,
)

__all__ = [
    "AXES",
    "COMBINED",
    "ENDS_AS_BLOCKS",
    "MAX_CP",
    "MAX_TP",
    "Columns",
    "Coordinates",
    "Cut",
    "HeadSplits",
    "Interval",
    "Invariant",
    "KeyValueHeads",
    "Kind",
    "Layout",
    "MeshAxis",
    "MeshShape",
    "Ownership",
    "Partial",
    "Partition",
    "Placement",
    "QueryHeads",
    "Replicate",
    "Shard",
    "Split",
    "StagePart",
    "Transition",
    "build_chunks",
    "build_head_splits",
    "build_split",
    "build_token_split",
    "derive_gradient_placement",
    "derive_parts",
    "derive_transition",
    "find_idle_stage",
    "find_token_unit",
    "list_parts",
    "list_rank_stages",
    "list_transitions",
    "select_parts",
    "share_layers",
]
