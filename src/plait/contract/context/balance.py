"""How much of the attention each rank computes: score elements, counted and not measured."""

from collections.abc import Iterable
from dataclasses import dataclass

from plait.contract.context.attention import ContextMethod, ContextPlan
from plait.contract.context.heads import split_heads
from plait.contract.context.tiles import Tile


@dataclass(frozen=True)
class RankWork:
    """Score elements `[query, key]` of one rank, over the batch and its heads.

    Attributes:
        tokens: of the sequence that it holds.
        visible: elements that are not hidden: the work that there is.
        computed: elements of the tiles that are computed, the hidden ones of bands among them.
        blocks: pairs of its queries with the keys of a rank; one where all keys are there at once.
        skipped: those of them in which all is hidden.
    """

    rank: int
    tokens: int
    visible: int
    computed: int
    blocks: int
    skipped: int


@dataclass(frozen=True)
class Balance:
    """The work of all ranks."""

    ranks: tuple[RankWork, ...]

    @property
    def total(self) -> int:
        """Visible elements of all ranks."""
        return sum(work.visible for work in self.ranks)

    @property
    def imbalance(self) -> float:
        """Work of the rank that has most over the mean: the time that attention takes over what it could."""
        most = max((work.visible for work in self.ranks), default=0)
        return most * len(self.ranks) / self.total if self.total else 1.0

    def __str__(self) -> str:
        head = "rank    tokens           visible          computed  blocks  skipped"
        rows = (
            f"{work.rank:4}  {work.tokens:8}  {work.visible:16}  {work.computed:16}  {work.blocks:6}  {work.skipped:7}"
            for work in self.ranks
        )
        return "\n".join([head, *rows, f"busiest rank / mean: {self.imbalance:.3f}"])


def derive_balance(
    plan: ContextPlan, method: ContextMethod = ContextMethod.RING, *, num_heads: int = 1, num_kv_heads: int = 1
) -> Balance:
    """Count the work of each rank.

    Raises:
        ShardingError: heads are to be dealt by `all_to_all`, and there are not enough of them.
    """
    return Balance(tuple(_derive_work(plan, method, rank, num_heads, num_kv_heads) for rank in range(plan.degree)))


def _derive_work(plan: ContextPlan, method: ContextMethod, rank: int, num_heads: int, num_kv_heads: int) -> RankWork:
    tokens, blocks, skipped, heads = plan.order.split.lengths[rank], 1, 0, num_heads
    match method:
        case ContextMethod.RING:
            needed = plan.needs.table[rank]
            blocks, skipped = plan.degree, plan.degree - sum(needed)
            tiles = [tile for owner in range(plan.degree) for tile in plan.block_tiles(rank, owner)]
        case ContextMethod.ALL_GATHER:
            tiles = [*plan.row_tiles(rank)]
        case ContextMethod.ALL_TO_ALL:
            tiles = [*plan.whole_tiles()]
            heads = split_heads(num_heads, num_kv_heads, plan.degree)[rank][0]
    visible, computed = _count(tiles)
    return RankWork(rank, tokens, heads * visible, heads * computed, blocks, skipped)


def _count(tiles: Iterable[Tile]) -> tuple[int, int]:
    visible = computed = 0
    for tile in tiles:
        visible, computed = visible + tile.num_visible, computed + tile.num_scores
    return visible, computed
