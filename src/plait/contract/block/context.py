"""The core of attention over sequences that are cut over a context axis: what moves, what is computed, what is kept."""

from plait.config.model import ModelConfig
from plait.contract.block.saved import derive_context_saved
from plait.contract.collective import Collective
from plait.contract.context.attention import AttentionSize, ContextMethod, build_plan
from plait.contract.context.heads import split_heads
from plait.contract.context.traffic import DKV, KV, Traffic, derive_context_traffic
from plait.contract.op import Op, Saved
from plait.contract.setting import Setting
from plait.contract.step import Gemm, Messages, Move, Step
from plait.dtype import DType
from plait.sharding import HeadSplits, Kind, Shard


def derive_context_attention(config: ModelConfig, setting: Setting, cuts: HeadSplits, module: str) -> Op:
    """Softmax attention of own query heads and own tokens, or of dealt heads; FLOPs as if every token saw every other.

    What moves is what `plait.contract.context.traffic` derives: collectives, or a ring's messages on this rank.
    """
    sequences = setting.sequences
    assert sequences is not None, setting
    plan = build_plan(sequences.order, sequences.mask, setting.batch)
    widths = (cuts.query.lengths[setting.rank], cuts.kv.lengths[setting.rank])
    size = derive_attention_size(setting, config.head_width, widths)
    traffic = derive_context_traffic(plan, size, setting.context_method)
    rows, heads, S, H = sequences.num_own, size.num_heads, sequences.size, config.head_width
    if setting.context_method is ContextMethod.ALL_TO_ALL and plan.degree > 1:
        dealt = split_heads(size.num_heads, size.num_kv_heads, plan.degree)
        rows, heads = S, dealt[sequences.rank][0]
    count = setting.batch * heads
    forward = (
        Gemm(f"{module}.scores", "forward", rows, H, S, count),
        Gemm(f"{module}.values", "forward", rows, S, H, count),
    )
    backward = (
        Gemm(f"{module}.values", "dgrad", S, rows, H, count),  # of v
        Gemm(f"{module}.values", "dgrad", rows, H, S, count),  # of the probabilities
        Gemm(f"{module}.scores", "dgrad", rows, S, H, count),  # of q
        Gemm(f"{module}.scores", "dgrad", S, rows, H, count),  # of k
    )
    q = setting.build_tensor("q", "N*H", cuts.query.size, Shard(1), cuts.query)
    k, v = (setting.build_tensor(name, "K*H", cuts.kv.size, Shard(1), cuts.kv) for name in "kv")
    return Op(
        name=module,
        inputs=(q, k, v),
        outputs=(setting.build_tensor("y", "N*H", cuts.query.size, Shard(1), cuts.query),),
        forward=_put_around(forward, traffic.forward, size, sequences.rank),
        backward=_put_around(backward, traffic.backward, size, sequences.rank),
        saved=(
            tuple(Saved(x.name, x.layout.local_shape(setting.rank), setting.dtype) for x in (q, k, v))
            if setting.recompute == "selective"
            else derive_context_saved(plan, size, setting.context_method, sequences.rank)
        ),
    )


def derive_attention_size(setting: Setting, head_width: int, widths: tuple[int, int]) -> AttentionSize:
    """Heads of the tp rank, which has `widths` features of queries and of keys, and in which formats they travel."""
    query, kv = widths
    return AttentionSize(
        batch=setting.batch,
        num_heads=query // head_width,
        num_kv_heads=kv // head_width,
        head_width=head_width,
        dtype=setting.dtype,
        sum_dtype=setting.reduce_dtype or setting.statistics_dtype,
    )


def _put_around(gemms: tuple[Step, ...], traffic: Traffic, size: AttentionSize, rank: int) -> tuple[Step, ...]:
    """What brings tensors together comes before what is computed of them, all else behind."""
    moves = list(map(_build_move, traffic.collectives))
    return (
        *moves[:1],
        *_list_messages(traffic, KV, "k, v", size.dtype, rank),
        *gemms,
        *_list_messages(traffic, DKV, "dk, dv", size.sum_dtype, rank),
        *moves[1:],
    )


def _build_move(collective: Collective) -> Move:
    if collective.kind is Kind.ALL_TO_ALL:
        tensor = "q, k, v" if collective.dim else "y"
        return Move(tensor, ("S", "N", "B", "H"), collective)
    tensor = "dk, dv" if collective.kind is Kind.REDUCE_SCATTER else "k, v"
    return Move(tensor, ("S", "2", "B", "K", "H"), collective)


def _list_messages(traffic: Traffic, name: str, tensor: str, dtype: DType, rank: int) -> list[Messages]:
    """Those that `rank` sends or receives; none where nobody sees its keys and it sees those of nobody."""
    passages = [each for each in traffic.passages if each.tensor == name]
    sent = tuple(each.num_bytes for each in passages if each.source == rank)
    received = tuple(each.num_bytes for each in passages if each.target == rank)
    if not sent and not received:
        return []
    return [Messages(tensor, ("S/cp", "2", "B", "K", "H"), "cp", dtype, sent, received)]
