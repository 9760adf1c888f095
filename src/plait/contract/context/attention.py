"""One attention over a context axis: how its tokens are dealt, what sees what, and what brings them together."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

from plait.contract.context.mask import AttentionMask
from plait.contract.context.needs import Needs
from plait.contract.context.tiles import Tile, derive_tiles
from plait.dtype import DType
from plait.sharding import Interval
from plait.sharding.token_order import TokenOrder


class ContextMethod(StrEnum):
    """How queries and keys of different ranks meet."""

    RING = "ring"
    """Keys and values travel from rank to rank, each block while the one before is computed (arXiv:2310.01889)."""
    ALL_GATHER = "all_gather"
    """Every rank gets all keys and values for its own queries (Llama 3, arXiv:2407.21783)."""
    ALL_TO_ALL = "all_to_all"
    """Every rank gets all tokens for its own heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""


@dataclass(frozen=True)
class AttentionSize:
    """What there is to attend: `[B, N, S, H]` queries, `[B, K, S, H]` keys and values.

    Attributes:
        dtype: of queries, keys and values.
        sum_dtype: in which gradients of keys and values are summed over ranks.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    dtype: DType
    sum_dtype: DType


@dataclass(frozen=True)
class ContextPlan:
    """Tokens in an order, and what sees what. What follows from it is derived once."""

    order: TokenOrder
    mask: AttentionMask
    batch: int

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.order.degree

    @cached_property
    def needs(self) -> Needs:
        """Which rank sees any of the keys of which."""
        ranks = range(self.degree)
        return Needs(tuple(tuple(bool(self.block_tiles(rank, owner)) for owner in ranks) for rank in ranks))

    def block_tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """What queries of `rank` see of keys of `owner`, both as they are stored there; nothing if all is hidden."""
        return self._derive(self.order.chunks[rank], self.order.chunks[owner])

    def row_tiles(self, rank: int) -> tuple[Tile, ...]:
        """What queries of `rank` see of all keys in the order of the sequence."""
        return self._derive(self.order.chunks[rank], self._whole)

    def whole_tiles(self) -> tuple[Tile, ...]:
        """What all queries see of all keys, both in the order of the sequence."""
        return self._derive(self._whole, self._whole)

    @property
    def _whole(self) -> tuple[Interval, ...]:
        return (Interval(0, self.order.size),) if self.order.size else ()

    @cached_property
    def _tiles(self) -> dict[tuple[tuple[Interval, ...], tuple[Interval, ...]], tuple[Tile, ...]]:
        return {}

    def _derive(self, q_chunks: tuple[Interval, ...], k_chunks: tuple[Interval, ...]) -> tuple[Tile, ...]:
        key = (q_chunks, k_chunks)
        if key not in self._tiles:
            self._tiles[key] = derive_tiles(q_chunks, k_chunks, self.mask, self.batch)
        return self._tiles[key]


@lru_cache(maxsize=64)
def build_plan(order: TokenOrder, mask: AttentionMask, batch: int) -> ContextPlan:
    """The plan of an attention: every layer has the same, and backward the one of forward."""
    return ContextPlan(order, mask, batch)
