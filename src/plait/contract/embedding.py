"""Embeddings: the vocabulary table cut over its rows, and the position table that every rank holds."""

from collections.abc import Mapping

from plait.contract.op import Op, Saved
from plait.contract.parameter import Parameter
from plait.contract.setting import Setting, Tensor
from plait.contract.step import derive_moves, derive_token_sum
from plait.sharding import Invariant, Layout, Ownership, Partial, Placement, Shard, derive_transition


def derive_vocab_embedding(setting: Setting, ownership: Mapping[str, Ownership], module: str) -> Op:
    """Look tokens up in the rows that the rank holds, zero elsewhere, and sum over ranks."""
    table = Parameter(ownership[f"{module}.weight"], ("V", "D"))
    leave = derive_transition(Partial(), setting.activation)
    ids = _build_ids(setting, Invariant())
    x = setting.build_tensor("x", "D", table.ownership.shape[1], setting.activation)
    return Op(
        name=module,
        inputs=(ids,),
        outputs=(x,),
        parameters=(table,),
        forward=derive_moves(setting, "x", leave, x),
        backward=derive_moves(setting, "dx", leave.conjugate, x),
        saved=(Saved("ids", ids.layout.shape, "int64"), Saved("mask", ids.layout.shape, "bool")),
    )


def derive_position_embedding(setting: Setting, ownership: Mapping[str, Ownership], module: str) -> Op:
    """Look the positions of the rank's tokens up in a table that every rank holds."""
    table = Parameter(ownership[f"{module}.weight"], ("S", "D"))
    positions = _build_ids(setting, setting.activation)
    return Op(
        name=module,
        inputs=(positions,),
        outputs=(setting.build_tensor("x", "D", table.ownership.shape[1], setting.activation),),
        parameters=(table,),
        backward=derive_token_sum(setting, (table,)),
        saved=(Saved("ids", positions.layout.local_shape(setting.rank), "int64"),),
    )


def _build_ids(setting: Setting, placement: Placement) -> Tensor:
    split = setting.token_split if isinstance(placement, Shard) else None
    return Tensor("ids", Layout(("T",), (setting.num_tokens,), placement, split))
