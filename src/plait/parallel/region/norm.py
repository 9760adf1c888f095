"""RMSNorm as one node of autograd on a CPU, where torch's is about ten that keep another `[T, D]`."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.autograd.once import once_differentiable
from plait.parallel.region.half import select_half
from plait.parallel.region.quantizer import Needs

_aten = torch.ops.aten


class RMSNorm(nn.RMSNorm):
    """`x / rms(x) * weight` (Zhang and Sennrich, arXiv:1910.07467): torch's, but for how a CPU computes it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of `x`, each token alone."""
        weight = self.weight
        return RMSNormFunction.apply(x, weight, self.eps) if is_one_node(x, weight) else super().forward(x)


def apply_rms_norm(module: nn.Module) -> None:
    """Make `RMSNorm` of a module that is a `nn.RMSNorm` and no subclass of it.

    In place, as FSDP does it: it stays the object that its hooks and whoever holds it know.
    """
    if type(module) is nn.RMSNorm:
        module.__class__ = RMSNorm


def is_one_node(x: Tensor, weight: Tensor | None) -> bool:
    """Whether `RMSNormFunction` takes these: plain tensors on a CPU, and nobody looks into what is done to them.

    A CUDA device and a compiler fuse torch's own. The kernel that gives `grad_x` divides by the number of tokens, so
    none are left to torch too.
    """
    return (
        not torch.compiler.is_compiling()
        and weight is not None
        and x.is_cpu
        and weight.is_cpu
        and type(x) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and weight.dim() == 1
        and x.shape[-1] == weight.shape[0]
        and x.is_floating_point()
        and weight.dtype in (x.dtype, torch.float32)
        and x.numel() > 0
        and not torch._C._are_functorch_transforms_active()
    )


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm that keeps its input and one number a token, whatever the dims of tokens.

        x          [T, D]
        weight     [D]
        y          [T, D]

        forward    y = x * scale * weight                                scale [T, 1] = 1 / sqrt(mean(x^2) + eps)
        wgrad      grad_weight = sum(grad_y * scale * x)                 over tokens
        dgrad      grad_x = grad - x * mean(grad * x) * scale^2          grad = grad_y * scale * weight

    dgrad is that of weight normalisation, rows divided by their norms, for which torch has one kernel. All but wgrad's
    sum treats a token alone: its bits do not depend on how many there are. Half types are computed in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = _as_matrix(x, dtype)
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        # Tensors instead of numbers where there is a choice: an operation with a number takes twice as long.
        added = norm.new_full((), torch.finfo(dtype).eps if eps is None else eps)
        scale = torch.addcmul(added, norm, norm, value=1 / rows.shape[1]).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        y = (rows * scale).mul_(weight)
        return y if rows is x else y.view(x.shape).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        needs = select_half(Needs(needs_x, (needs_weight,), ()))
        rows = _as_matrix(x, scale.dtype)
        grad = _as_matrix(grad_y, scale.dtype) * scale
        grad_x = grad_weight = None
        if needs.weights[0]:
            grad_weight = (grad * rows).sum(0)
        if needs.x:
            norm = scale.new_full((), sqrt(rows.shape[1])) / scale
            # Of rows times norm / norm.
            grad_x, _ = _aten._weight_norm_interface_backward(grad.mul_(weight), rows, norm, norm, 0)
            grad_x = grad_x if rows is x else grad_x.view(x.shape)
        return grad_x, grad_weight, None  # which autograd casts to the types of `x` and `weight`


def _as_matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[T, D]` without gaps; what is so already goes through no operation, as each costs as much as a small sum."""
    if x.dim() == 2 and x.dtype == dtype and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()
