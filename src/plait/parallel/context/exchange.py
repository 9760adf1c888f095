"""All tokens on every rank, for its own heads (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509)."""

from typing import Any

import torch
from torch import Tensor

from plait.comm.autograd import redistribute
from plait.comm.autograd.once import once_differentiable
from plait.contract.context.heads import build_exchange_heads
from plait.contract.context.tiles import Tile
from plait.parallel.context.context import Site
from plait.parallel.context.tile import Accumulator, attend_tiles, attend_tiles_backward, build_rows
from plait.parallel.context.tokens import put_back, store
from plait.sharding import Interval, Shard, Split


def attend_exchanged(q: Tensor, k: Tensor, v: Tensor, site: Site) -> Tensor:
    """Deal heads instead of tokens, attend, and deal tokens again.

        q          [B, N, S/cp, H]
        k, v       [B, K, S/cp, H]
        y          [B, N, S/cp, H]

        forward    all_to_all of q, k and v together [S, N + 2K, B, H], then of y [S, N, B, H] over cp
        backward   the same two, the other way round

    With fewer KV heads than ranks, several ranks get the same KV head, and its gradient is the sum of theirs.
    """
    axis, order = site.axis, site.plan.order
    heads = build_exchange_heads(q.shape[1], k.shape[1], axis.degree)
    packed = torch.cat([q, k, v], 1).permute(2, 1, 0, 3)  # [S/cp, N + 2K, B, H]
    wanted = [at for query, kv in heads for at in _list_packed(query, kv, q.shape[1], k.shape[1])]
    if wanted != list(range(packed.shape[1])):
        packed = packed.index_select(1, torch.tensor(wanted, device=q.device))
    cut = _build_split(len(query) + 2 * len(kv) for query, kv in heads)
    split, label = order.split, site.label
    own = redistribute(packed, axis, Shard(0), Shard(1), split=split, target_split=cut, label=f"{label}: q, k, v")
    query, kv = heads[axis.rank]
    own_q, own_k, own_v = put_back(own, order, dim=0).permute(2, 1, 0, 3).split([len(query), len(kv), len(kv)], 1)
    out = _WholeAttention.apply(own_q, own_k, own_v, site.plan.whole_tiles(), site.scale)
    stored = store(out.permute(2, 1, 0, 3), order, dim=0)
    query_cut = _build_split(len(query) for query, _ in heads)
    y = redistribute(stored, axis, Shard(1), Shard(0), split=query_cut, target_split=split, label=f"{label}: y")
    return y.permute(2, 1, 0, 3)


def _list_packed(query: range, kv: range, num_heads: int, num_kv_heads: int) -> list[int]:
    """Where a rank's heads are among those of q, k and v one behind the other."""
    return [*query, *(num_heads + head for head in kv), *(num_heads + num_kv_heads + head for head in kv)]


def _build_split(lengths: Any) -> Split:
    intervals, start = [], 0
    for length in lengths:
        intervals.append(Interval(start, start + length))
        start += length
    return Split(start, tuple(intervals))


class _WholeAttention(torch.autograd.Function):
    """Attention of some heads on one rank, in tiles; nothing moves."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], scale: float) -> Tensor:
        seen = Accumulator(q)
        attend_tiles(q, k, v, tiles, scale, seen)
        out = seen.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, seen.lse)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rows = build_rows(grad, q, out, lse, ctx.scale)
        grads = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        attend_tiles_backward(rows, k, v, ctx.tiles, (grads[0], grads[1], grads[2]))
        return *(x.to(q.dtype) for x in grads), None, None
