"""An unsharded model whose every GEMM adds its terms up in another order: how far rounding alone moves the results."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NUM_CHUNKS = 3
"""Chunks of tokens, of outputs and of inputs; odd, so that no tp degree in use cuts at the same places."""


def apply_reordering(model: nn.Module) -> None:
    """Make every `nn.Linear` of `model` evaluate chunk by chunk, last chunk first.

    Chunks of inputs reorder the sums of the forward GEMM, chunks of outputs those of dgrad, chunks of tokens those of
    wgrad. What a quantized linear sums in float64 are products of codes of few bits: exact, in any order.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(_evaluate_reordered)


def _evaluate_reordered(linear: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    (x,) = inputs
    rows = [_reordered_rows(piece, linear) for piece in x.flatten(0, -2).chunk(_NUM_CHUNKS)]
    return torch.cat(rows).view_as(output)


def _reordered_rows(x: Tensor, linear: nn.Linear) -> Tensor:
    weights = linear.weight.chunk(_NUM_CHUNKS, dim=0)
    y = torch.cat([_sum_reversed(x, weight) for weight in weights], dim=-1)
    return y if linear.bias is None else y + linear.bias  # type: ignore[redundant-expr]


def _sum_reversed(x: Tensor, weight: Tensor) -> Tensor:
    pairs = zip(x.chunk(_NUM_CHUNKS, dim=-1), weight.chunk(_NUM_CHUNKS, dim=-1), strict=True)
    first, *rest = reversed([F.linear(x_chunk, w_chunk) for x_chunk, w_chunk in pairs])
    return sum(rest, start=first)
