"""Dropout of activations: each rank masks the tokens it holds, and keeps the mask."""

from plait.contract.op import Op, Saved
from plait.contract.setting import Setting


def derive_dropout(setting: Setting, module: str, width: int) -> Op:
    """Dropout over `[T, D]`; the mask is one byte an element."""
    x = setting.build_tensor("x", "D", width, setting.activation)
    return Op(
        name=module,
        inputs=(x,),
        outputs=(setting.build_tensor("y", "D", width, setting.activation),),
        saved=(Saved("mask", x.layout.local_shape(setting.rank), "bool"),),
    )
