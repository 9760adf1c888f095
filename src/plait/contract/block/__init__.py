"""One transformer block: what its attention half and its MLP half promise, in the order of forward."""

from collections.abc import Mapping

from plait.config.model import ModelConfig
from plait.contract.block.attention import derive_attention
from plait.contract.block.mlp import derive_mlp
from plait.contract.op import Op
from plait.contract.setting import Setting
from plait.sharding import Ownership


def derive_block(
    config: ModelConfig, setting: Setting, ownership: Mapping[str, Ownership], index: int
) -> tuple[Op, ...]:
    """The operations of block `index`."""
    block = f"layers.{index}"
    return (*derive_attention(config, setting, ownership, block), *derive_mlp(config, setting, ownership, block))
