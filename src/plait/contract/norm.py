"""Norms and dropout: every token alone, so each rank treats its own; a norm sums its weight gradients over tp."""

from collections.abc import Mapping

from plait.contract.op import Op, Saved
from plait.contract.parameter import Parameter
from plait.contract.setting import Setting
from plait.contract.step import derive_token_sum
from plait.sharding import Ownership


def derive_norm(setting: Setting, ownership: Mapping[str, Ownership], module: str) -> Op:
    """RMSNorm or LayerNorm over the model width.

    The statistics it keeps beside `x`, one or two numbers a token, are not counted.
    """
    names = [f"{module}.{part}" for part in ("weight", "bias") if f"{module}.{part}" in ownership]
    parameters = tuple(Parameter(ownership[name], ("D",)) for name in names)
    (width,) = parameters[0].ownership.shape
    x = setting.build_tensor("x", "D", width, setting.activation)
    return Op(
        name=module,
        inputs=(x,),
        outputs=(setting.build_tensor("y", "D", width, setting.activation),),
        parameters=parameters,
        backward=derive_token_sum(setting, parameters),
        saved=(Saved("x", x.layout.local_shape(setting.rank), setting.dtype),),
    )


def derive_dropout(setting: Setting, module: str, width: int) -> Op:
    """Dropout of activations `[T, D]`: the mask that is kept is one byte an element."""
    x = setting.build_tensor("x", "D", width, setting.activation)
    return Op(
        name=module,
        inputs=(x,),
        outputs=(setting.build_tensor("y", "D", width, setting.activation),),
        saved=(Saved("mask", x.layout.local_shape(setting.rank), "bool"),),
    )
