"""All keys and values on every rank, for its own queries."""

from typing import Any

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.autograd.once import once_differentiable
from plait.parallel.context.context import Site
from plait.parallel.context.packed import pack, unpack
from plait.parallel.context.tile import Accumulator, attend_tiles, attend_tiles_backward, build_rows
from plait.parallel.context.tokens import put_back, store


class AllGatherAttention(torch.autograd.Function):
    """Attention of the own queries over all keys (Llama 3, arXiv:2407.21783).

        q          [B, N, S/cp, H]
        k, v       [B, K, S/cp, H]
        y          [B, N, S/cp, H]

        forward    all_gather of k and v [S, 2, B, K, H] over cp
        backward   all_gather of k and v again, which are not kept, then reduce_scatter of their gradients over cp

    Contract: contract/context/traffic.py.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, site: Site) -> Tensor:
        seen = Accumulator(q)
        kv_shard = pack(k, v)
        attend_tiles(q, *unpack(_gather(kv_shard, site)), site.plan.row_tiles(site.axis.rank), site.scale, seen)
        out = seen.out.to(q.dtype)
        ctx.save_for_backward(q, kv_shard, out, seen.lse)
        ctx.site = site
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv_shard, out, lse = ctx.saved_tensors
        site: Site = ctx.site
        rows = build_rows(grad, q, out, lse, site.scale)
        kv = _gather(kv_shard, site)
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        tiles = site.plan.row_tiles(site.axis.rank)
        attend_tiles_backward(rows, *unpack(kv), tiles, (grad_q, *unpack(grad_kv)))
        order, label = site.plan.order, f"{site.label}: dk, dv"
        stored = store(grad_kv, order, dim=0)
        grad_shard = collectives.reduce_scatter(stored, site.axis, order.split, dtype=site.sum_dtype, label=label)
        grad_k, grad_v = unpack(grad_shard.to(q.dtype))
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _gather(kv_shard: Tensor, site: Site) -> Tensor:
    """All keys and values in the order of the sequence."""
    order = site.plan.order
    stored = collectives.all_gather(kv_shard, site.axis, order.split, label=f"{site.label}: k, v")
    return put_back(stored, order, dim=0)
