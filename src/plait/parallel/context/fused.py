"""Torch's own attention kernels, those which give the log-sum-exp and take it in backward.

Given the log-sum-exp and the output of a whole row, their backward of some of its keys is the part of the gradient that
these keys have: that is why a row can be computed tile by tile.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten

Grads = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


@dataclass(frozen=True)
class Kernel:
    """Attention of one tile, all of which is seen or that is causal.

    Attributes:
        forward: of q `[B, N, Sq, H]`, k and v `[B, K, Sk, H]`, whether causal, and the scale: output and log-sum-exp.
        backward: of the gradient of the output, q, k, v, output, log-sum-exp, whether causal, and the scale.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], Grads]


def find_kernel(q: Tensor) -> Kernel | None:
    """The kernel for tensors such as `q`, or None."""
    if q.device.type == "cpu" and q.is_floating_point():
        return _CPU
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0:
        return _CUDA
    return None


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def _backward_on_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> Grads:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads: Grads = backward(grad, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    return grads


def _forward_on_cuda(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse


def _backward_on_cuda(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> Grads:
    none = torch.zeros((), dtype=torch.uint64, device=q.device)  # state of a random generator: there is no dropout
    lengths = (None, None, q.shape[2], k.shape[2])
    backward = _aten._scaled_dot_product_flash_attention_backward
    grads: Grads = backward(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, is_causal, none, none, scale=scale)
    return grads


_CPU = Kernel(_forward_on_cpu, _backward_on_cpu)
_CUDA = Kernel(_forward_on_cuda, _backward_on_cuda)
