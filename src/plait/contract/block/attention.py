"""The attention half of a block: norm, q/k/v in one gather group, the rank's own heads, output projection."""

from collections.abc import Mapping

from plait.config.model import GptConfig, ModelConfig
from plait.config.recipe import Recipe
from plait.contract.block.context import derive_context_attention
from plait.contract.linear import LinearParameters, build_linear_parameters, derive_column_group, derive_row
from plait.contract.norm import derive_dropout, derive_norm
from plait.contract.op import Op, Saved
from plait.contract.setting import Setting
from plait.contract.step import Gemm
from plait.sharding import HeadSplits, Ownership, Shard


def derive_attention(
    config: ModelConfig,
    setting: Setting,
    ownership: Mapping[str, Ownership],
    recipes: Mapping[str, Recipe],
    block: str,
) -> tuple[Op, ...]:
    """The operations of the attention half of `block` (`layers.0`)."""
    attention = f"{block}.attention"
    query, key, value = (
        build_linear_parameters(ownership, recipes, f"{attention}.{name}", (letters, "D"))
        for name, letters in (("wq", "N*H"), ("wk", "K*H"), ("wv", "K*H"))
    )
    wo = build_linear_parameters(ownership, recipes, f"{attention}.wo", ("D", "N*H"))
    ops = (
        derive_norm(setting, ownership, f"{block}.attention_norm"),
        derive_column_group(setting, (query, key, value)),
        derive_core_attention(config, setting, HeadSplits(query.cut, key.cut), wo, attention),
        derive_row(setting, wo),
    )
    if isinstance(config, GptConfig) and config.dropout:
        return (*ops, derive_dropout(setting, f"{block}.attention_dropout", config.width))
    return ops


def derive_core_attention(
    config: ModelConfig, setting: Setting, cuts: HeadSplits, wo: LinearParameters, module: str
) -> Op:
    """Softmax attention of the query heads that the rank owns; FLOPs as if every token saw every other.

    Fused attention keeps q, k, v and the log-sum-exp of every row, and its output, which the projection `wo` that
    follows keeps as well: that is counted here only where `wo` is quantized and keeps bytes of its own.
    Dropout on the probabilities needs them whole: then they, the mask and the dropped ones are kept, counted in the
    dtype of activations, though softmax normalises in at least float32.
    """
    if setting.sequences is not None:
        return derive_context_attention(config, setting, cuts, module)
    rank, S, H = setting.rank, setting.seq_len, config.head_width
    heads = cuts.query.lengths[rank] // H
    q = setting.build_tensor("q", "N*H", cuts.query.size, Shard(1), cuts.query)
    k, v = (setting.build_tensor(name, "K*H", cuts.kv.size, Shard(1), cuts.kv) for name in "kv")
    count = setting.batch * heads
    rows = (setting.batch, heads, S)
    is_fused = not (isinstance(config, GptConfig) and config.attention_dropout)
    probabilities = (
        (Saved("lse", rows, "float32"),)
        if is_fused
        else tuple(
            Saved(name, (*rows, S), dtype)
            for name, dtype in (("probabilities", setting.dtype), ("mask", "bool"), ("dropped", setting.dtype))
        )
    )
    y = setting.build_tensor("y", "N*H", cuts.query.size, Shard(1), cuts.query)
    output = (Saved("y", y.layout.local_shape(rank), setting.dtype),) if is_fused and wo.recipe is not None else ()
    return Op(
        name=module,
        inputs=(q, k, v),
        outputs=(y,),
        forward=(
            Gemm(f"{module}.scores", "forward", S, H, S, count),
            Gemm(f"{module}.values", "forward", S, S, H, count),
        ),
        backward=(
            Gemm(f"{module}.values", "dgrad", S, S, H, count),  # of v
            Gemm(f"{module}.values", "dgrad", S, H, S, count),  # of the probabilities
            Gemm(f"{module}.scores", "dgrad", S, S, H, count),  # of q
            Gemm(f"{module}.scores", "dgrad", S, S, H, count),  # of k
        ),
        saved=(
            *(Saved(x.name, x.layout.local_shape(rank), setting.dtype) for x in (q, k, v)),
            *probabilities,
            *output,
        ),
    )
