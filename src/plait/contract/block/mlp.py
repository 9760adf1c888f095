"""The MLP half of a block: norm, up (and gate) projection, activation of the rank's own columns, down projection."""

from collections.abc import Mapping

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.recipe import Recipe
from plait.contract.linear import build_linear_parameters, derive_column_group, derive_row
from plait.contract.norm import derive_dropout, derive_norm
from plait.contract.op import Op, Saved
from plait.contract.setting import Setting
from plait.sharding import Ownership, Shard, Split


def derive_mlp(
    config: ModelConfig,
    setting: Setting,
    ownership: Mapping[str, Ownership],
    recipes: Mapping[str, Recipe],
    block: str,
) -> tuple[Op, ...]:
    """The operations of the MLP half of `block` (`layers.0`)."""
    mlp = f"{block}.mlp"
    is_gated = isinstance(config, LlamaConfig)
    names = ("w_gate", "w_up") if is_gated else ("w_up",)
    up = [build_linear_parameters(ownership, recipes, f"{mlp}.{name}", ("F", "D")) for name in names]
    ops = (
        derive_norm(setting, ownership, f"{block}.mlp_norm"),
        derive_column_group(setting, up),
        derive_activation(setting, up[0].cut, mlp, is_gated=is_gated),
        derive_row(setting, build_linear_parameters(ownership, recipes, f"{mlp}.w_down", ("D", "F"))),
    )
    if isinstance(config, GptConfig) and config.dropout:
        return (*ops, derive_dropout(setting, f"{block}.mlp_dropout", config.width))
    return ops


def derive_activation(setting: Setting, cut: Split, module: str, *, is_gated: bool) -> Op:
    """`silu(gate) * up` or `gelu(up)`; it keeps what it reads."""
    names = ("gate", "up") if is_gated else ("up",)
    inputs = tuple(setting.build_tensor(name, "F", cut.size, Shard(1), cut) for name in names)
    return Op(
        name=module,
        inputs=inputs,
        outputs=(setting.build_tensor("y", "F", cut.size, Shard(1), cut),),
        saved=tuple(Saved(name, inputs[0].layout.local_shape(setting.rank), setting.dtype) for name in names),
    )
