"""Attention of one tile with any mask, by its definition: scores, softmax, product. A few hundred queries at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from plait.parallel.context.fused import Grads

MAX_ROWS = 256
"""Queries whose scores exist at once."""

Bounds = tuple[int | None, int | None]
"""Query u and key w see each other if `low <= u - w <= high`."""


def attend_plain(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in the dtype of accumulators; 0 and -inf for a query that sees nothing.

    q        [B, N, Sq, H]
    k, v     [B, K, Sk, H]
    out      [B, N, Sq, H]
    lse      [B, N, Sq]
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape, dtype=dtype), q.new_empty(q.shape[:-1], dtype=dtype)
    k_wide, v_wide = (x.to(dtype).unsqueeze(2) for x in (k, v))
    for rows, q_rows in _iterate(q, dtype, k.shape[1]):
        scores = _score(q_rows, k_wide, rows, bounds, scale)
        lse_rows = scores.logsumexp(-1)
        out[:, :, rows] = (_weigh(scores, lse_rows) @ v_wide).flatten(1, 2)
        lse[:, :, rows] = lse_rows.flatten(1, 2)
    return out, lse


def attend_plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, bounds: Bounds, scale: float
) -> Grads:
    """The part of the gradients that is of these keys, in the dtype of accumulators.

    `lse` and `delta = (grad * out).sum(-1)`, both `[B, N, Sq]`, are those of whole rows.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    grad_q = q.new_empty(q.shape, dtype=dtype)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
    k_wide, v_wide = (x.to(dtype).unsqueeze(2) for x in (k, v))
    num_groups = k.shape[1]
    for rows, q_rows in _iterate(q, dtype, num_groups):
        grad_rows = _group(grad[:, :, rows].to(dtype), num_groups)
        weights = _weigh(_score(q_rows, k_wide, rows, bounds, scale), _group(lse[:, :, rows], num_groups))
        grad_weights = grad_rows @ v_wide.mT - _group(delta[:, :, rows], num_groups).unsqueeze(-1)
        grad_scores = weights * grad_weights * scale
        grad_q[:, :, rows] = (grad_scores @ k_wide).flatten(1, 2)
        grad_k += (grad_scores.mT @ q_rows).sum(2)
        grad_v += (weights.mT @ grad_rows).sum(2)
    return grad_q, grad_k, grad_v


def _iterate(q: Tensor, dtype: torch.dtype, num_groups: int) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, q.shape[2], MAX_ROWS):
        rows = slice(start, min(start + MAX_ROWS, q.shape[2]))
        yield rows, _group(q[:, :, rows].to(dtype), num_groups)


def _group(x: Tensor, num_groups: int) -> Tensor:
    """`[B, N, ...]` as `[B, K, N/K, ...]`: query heads beside the KV head that they read."""
    return x.unflatten(1, (num_groups, -1))


def _score(q: Tensor, k: Tensor, rows: slice, bounds: Bounds, scale: float) -> Tensor:
    """`[B, K, N/K, rows, Sk]`, -inf where hidden."""
    scores = q @ k.mT * scale
    low, high = bounds
    if low is None and high is None:
        return scores
    u = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1)
    distance = u - torch.arange(k.shape[-2], device=q.device)
    is_hidden = torch.zeros_like(distance, dtype=torch.bool)
    if low is not None:
        is_hidden |= distance < low
    if high is not None:
        is_hidden |= distance > high
    return scores.masked_fill(is_hidden, float("-inf"))


def _weigh(scores: Tensor, lse: Tensor) -> Tensor:
    """Probabilities; 0 throughout for a query that sees nothing."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
