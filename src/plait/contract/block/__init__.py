"""One transformer block: what its attention half and its MLP half promise, in the order of forward."""

from collections.abc import Mapping

from plait.config.model import ModelConfig
from plait.config.recipe import Recipe
from plait.contract.block.attention import derive_attention
from plait.contract.block.mlp import derive_mlp
from plait.contract.op import Op
from plait.contract.recompute import apply_recompute
from plait.contract.setting import Setting
from plait.sharding import Ownership


def derive_block(
    config: ModelConfig,
    setting: Setting,
    ownership: Mapping[str, Ownership],
    recipes: Mapping[str, Recipe],
    index: int,
) -> tuple[Op, ...]:
    """The operations of block `index`; `recipes` are those of the linears that are quantized, by module."""
    block = f"layers.{index}"
    ops = (
        *derive_attention(config, setting, ownership, recipes, block),
        *derive_mlp(config, setting, ownership, recipes, block),
    )
    return apply_recompute(ops, setting.recompute)
