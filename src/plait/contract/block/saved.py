"""What a rank keeps of an attention from forward for backward: never keys and values of others, but those exchanged."""

from plait.contract.context.attention import AttentionSize, ContextMethod, ContextPlan
from plait.contract.context.heads import split_heads
from plait.contract.op import Saved
from plait.dtype import DType


def derive_context_saved(plan: ContextPlan, size: AttentionSize, method: ContextMethod, rank: int) -> tuple[Saved, ...]:
    """Queries, keys and values, the output, and the log-sum-exp in the dtype of accumulators.

    An exchange keeps the order in which it deals heads, too.

    Raises:
        ShardingError: heads are to be dealt by `all_to_all`, and there are not enough of them.
    """
    tokens, heads, kv_heads = plan.order.split.lengths[rank], size.num_heads, size.num_kv_heads
    order: tuple[Saved, ...] = ()
    if method is ContextMethod.ALL_TO_ALL and plan.degree > 1:
        dealt = split_heads(heads, kv_heads, plan.degree)
        tokens, (heads, kv_heads) = plan.order.size, dealt[rank]
        order = (Saved("heads", (sum(query + 2 * kv for query, kv in dealt),), "int64"),)
    lse_dtype: DType = "float64" if size.dtype == "float64" else "float32"
    whole = (size.batch, heads, tokens, size.head_width)
    return (
        Saved("q", whole, size.dtype),
        Saved("kv", (tokens, 2, size.batch, kv_heads, size.head_width), size.dtype),
        Saved("y", whole, size.dtype),
        Saved("lse", whole[:-1], lse_dtype),
        *order,
    )
