"""Attention over a context axis, for models to call where one device calls `scaled_dot_product_attention`."""

from math import sqrt

import torch
from torch import Tensor

from plait.contract.context.attention import ContextMethod
from plait.contract.context.mask import CAUSAL, AttentionMask
from plait.parallel.context.agree import check_same_attention
from plait.parallel.context.context import Context, Site, check_tensors
from plait.parallel.context.exchange import attend_exchanged
from plait.parallel.context.gather import AllGatherAttention
from plait.parallel.context.ring import RingAttention


def attend(
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    context: Context,
    mask: AttentionMask = CAUSAL,
    *,
    scale: float | None = None,
    label: str = "attention",
) -> Tensor:
    """Attend as if the whole sequence were on one device: exactly, whatever the method and the order of tokens.

        q_BNSH             [B, N, S/cp, H]     queries of the own tokens, rotated by their positions
        k_BKSH, v_BKSH     [B, K, S/cp, H]     each read by N/K query heads
        y_BNSH             [B, N, S/cp, H]     0 for padding

        forward, backward  as `ring.RingAttention`, `gather.AllGatherAttention`, `exchange.attend_exchanged` say

    Every rank of the axis has to call it with the same mask, that of all tokens. Scores are multiplied by `scale`, else
    by `1 / sqrt(H)`. Outputs, log-sum-exps and gradients are accumulated in float32 (float64 for float64); gradients of
    keys and values are summed over ranks in the axis's `reduce_dtype`, else in that.

    Raises:
        ShardingError: the tensors are not those of the own tokens, or the method cannot deal their heads.
    """
    q_BNSH = q_BNSH if q_BNSH.stride(-1) == 1 else q_BNSH.contiguous()
    plan = check_tensors(q_BNSH, k_BKSH, v_BKSH, context, mask, label)
    sum_dtype = context.axis.reduce_dtype or torch.promote_types(q_BNSH.dtype, torch.float32)
    site = Site(context, plan, 1 / sqrt(q_BNSH.shape[-1]) if scale is None else scale, sum_dtype, label)
    check_same_attention(site, q_BNSH, k_BKSH)
    match context.method:
        case ContextMethod.RING:
            return RingAttention.apply(q_BNSH, k_BKSH, v_BKSH, site)
        case ContextMethod.ALL_GATHER:
            return AllGatherAttention.apply(q_BNSH, k_BKSH, v_BKSH, site)
    return attend_exchanged(q_BNSH, k_BKSH, v_BKSH, site)
