"""Which heads each rank attends with after an all-to-all: whole KV groups, or query heads within one."""

from plait.errors import ShardingError
from plait.sharding import build_head_splits


def split_heads(num_heads: int, num_kv_heads: int, degree: int) -> list[tuple[int, int]]:
    """How many query heads and KV heads each rank gets from an all-to-all."""
    splits = build_exchange_heads(num_heads, num_kv_heads, degree)
    return [(len(query), len(kv)) for query, kv in splits]


def build_exchange_heads(num_heads: int, num_kv_heads: int, degree: int) -> list[tuple[range, range]]:
    """Query heads and KV heads of each rank after an all-to-all; with fewer KV heads than ranks, several have the same.

    Raises:
        ShardingError: a rank would have no query head.
    """
    if degree > num_heads:
        raise ShardingError(
            f"all_to_all over a context axis of degree {degree} gives each rank its own heads, "
            f"but there are only {num_heads} query heads: a rank would have none",
            hint="use ring or all_gather, which cut no heads, or a degree of at most the number of heads",
        )
    splits = build_head_splits(num_heads, num_kv_heads, 1, degree)
    return [
        (range(query.start, query.stop), range(kv.start, kv.stop))
        for query, kv in zip(splits.query.intervals, splits.kv.intervals, strict=True)
    ]
