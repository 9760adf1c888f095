"""How many heads an attention module has, in all and on one rank, and where its source counts them."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.sharding import KeyValueHeads, QueryHeads

KEY_VALUE = ("k_proj", "v_proj", "k", "v")
"""Projections to key and value heads, by the end of their path; all others of an attention are to query heads."""

_READS_CONFIG = ("Phi3Attention", "Phi4MultimodalAttention")
"""Attention classes that count heads by `self.config` while they run."""


@dataclass(frozen=True)
class HeadCount:
    """Heads of one attention module."""

    num_heads: int
    num_kv_heads: int

    def cut_queries(self, features: int) -> QueryHeads:
        """The cut of so many features of query heads."""
        return QueryHeads(self.num_heads, self.num_kv_heads, features // self.num_heads)

    def cut_keys(self, features: int) -> KeyValueHeads:
        """The cut of so many features of key or value heads."""
        return KeyValueHeads(self.num_heads, self.num_kv_heads, features // self.num_kv_heads)

    def per_rank(self, degree: int, rank: int) -> "HeadCount":
        """The heads of one tp rank; key and value heads may be on several."""
        heads = self.cut_queries(self.num_heads).build_split(self.num_heads, degree)
        kv_heads = self.cut_keys(self.num_kv_heads).build_split(self.num_kv_heads, degree)
        return HeadCount(heads.lengths[rank], kv_heads.lengths[rank])


def count_heads(attention: nn.Module, config: Any) -> HeadCount:
    """Read the heads of an attention module from its config, or from that of its model."""
    config = getattr(attention, "config", config)
    num_heads = config.num_attention_heads
    return HeadCount(num_heads, getattr(config, "num_key_value_heads", None) or num_heads)


def apply_heads(attention: nn.Module, all_heads: HeadCount, own: HeadCount) -> None:
    """Let an attention module count the heads of this rank, wherever its source counts heads."""
    counts = {
        "num_heads": own.num_heads,
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_kv_heads,
        "num_key_value_groups": own.num_heads // own.num_kv_heads,
    }
    if "split_size" in vars(attention):
        counts["split_size"] = vars(attention)["split_size"] // all_heads.num_heads * own.num_heads
    for name, count in counts.items():
        if name in vars(attention):
            setattr(attention, name, count)
    if type(attention).__name__ in _READS_CONFIG:
        attention.config = OwnConfig(attention.config, own)  # type: ignore[assignment]


class OwnConfig:
    """A config that says how many heads this rank has, and otherwise whatever the model's own says at the time."""

    def __init__(self, config: Any, own: HeadCount) -> None:
        self._config = config
        self.num_attention_heads = own.num_heads
        self.num_key_value_heads = own.num_kv_heads

    def __getattr__(self, name: str) -> Any:
        # A copy in the making has no attributes yet.
        if name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)
