"""Attention of some queries over all the keys they see, tile by tile, with accumulators in float32 or float64.

Tiles are merged by their log-sum-exp (Dao et al., arXiv:2205.14135; Liu et al., arXiv:2310.01889): the output of a row
over two sets of keys is that over either, weighted by `exp(lse - lse of both)`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.contract.context.tiles import Tile
from plait.parallel.context.fused import find_kernel
from plait.parallel.context.plain import attend_plain, attend_plain_backward
from plait.sharding import Interval


class Accumulator:
    """The output over the keys that have been seen so far.

    Attributes:
        out: `[B, N, S, H]`; 0 where nothing has been seen.
        lse: `[B, N, S]`; -inf where nothing has been seen.
    """

    def __init__(self, q: Tensor) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype, device=q.device)

    def merge(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Take in what the queries of a tile have of its keys."""
        so_far, lse_so_far = _cut(self.out, tile.batch, tile.q), _cut(self.lse, tile.batch, tile.q)
        lse_of_both = torch.logaddexp(lse_so_far, lse)
        shift = lse_of_both.masked_fill(lse_of_both == float("-inf"), 0.0)
        so_far.mul_((lse_so_far - shift).exp_().unsqueeze(-1))
        so_far.add_(out * (lse - shift).exp_().unsqueeze(-1))
        lse_so_far.copy_(lse_of_both)


@dataclass(frozen=True)
class Rows:
    """What backward needs of whole rows of queries.

    Attributes:
        grad: of the output, `[B, N, S, H]`.
        out: the output in the dtype of the queries, `[B, N, S, H]`.
        lse: `[B, N, S]`.
        delta: `(grad * out).sum(-1)`, `[B, N, S]`.
        scale: of the scores.
    """

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor
    scale: float


def build_rows(grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float) -> Rows:
    """Gather what every tile needs; a gradient may come expanded, which no kernel takes."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return Rows(grad, q, out, lse, delta, scale)


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile], scale: float, seen: Accumulator) -> None:
    """Take what `tiles` see of the keys `[B, K, S, H]` into `seen`."""
    for tile in tiles:
        own_q = _cut(q, tile.batch, tile.q)
        own_k, own_v = (_cut(x, tile.batch, tile.k) for x in (k, v))
        kernel = find_kernel(q) if tile.is_full or tile.is_causal else None
        if kernel is None:
            out, lse = attend_plain(own_q, own_k, own_v, (tile.low, tile.high), scale)
        else:
            out, lse = kernel.forward(own_q, own_k, own_v, tile.is_causal, scale)
        seen.merge(tile, out, lse)


def attend_tiles_backward(
    rows: Rows, k: Tensor, v: Tensor, tiles: Iterable[Tile], grads: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add what `tiles` have of the gradients of q, k and v to `grads`, which are in the dtype of accumulators."""
    for tile in tiles:
        grad, q, out, lse, delta = (
            _cut(x, tile.batch, tile.q) for x in (rows.grad, rows.q, rows.out, rows.lse, rows.delta)
        )
        own_k, own_v = (_cut(x, tile.batch, tile.k) for x in (k, v))
        kernel = find_kernel(q) if tile.is_full or tile.is_causal else None
        if kernel is None:
            parts = attend_plain_backward(grad, q, own_k, own_v, lse, delta, (tile.low, tile.high), rows.scale)
        else:
            parts = kernel.backward(grad, q, own_k, own_v, out, lse, tile.is_causal, rows.scale)
        for total, part, along in zip(grads, parts, (tile.q, tile.k, tile.k), strict=True):
            _cut(total, tile.batch, along).add_(part)


def _cut(x: Tensor, batch: Interval, rows: Interval) -> Tensor:
    """Some rows of a `[B, heads, S, ...]`."""
    return x[batch.start : batch.stop, :, rows.start : rows.stop]
