"""The norm of all gradients, every element of the unsharded model counted once, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plait.comm import collectives
from plait.parallel.apply import ownership_of, record_of, repeated_in
from plait.parallel.fsdp.local import local_of


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before, the same on every rank.

        forward    all_reduce sum [1] over tp, over the ranks that share parameters out, and over pp

    Which rank counts a replicated parameter is read off its ownership, so the norm is that of the unsharded model at
    every degree. It is accumulated in float32 (float64 where a gradient is float64). Gradients must be summed over dp
    already; over tp each layer has done that itself. A norm that is not finite makes all gradients so, as in torch.
    """
    norm = compute_grad_norm(model)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in _group_by_dtype(local_of(param.grad) for param in model.parameters() if param.grad is not None):
        torch._foreach_mul_(grads, scale)
    return norm


@torch.no_grad()
def compute_grad_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients of the unsharded model, the same on every rank."""
    record = record_of(model)
    total = _sum_own_squares(model, 0 if record is None else record.mesh.tp.rank)
    for axis in () if record is None else (record.mesh.tp, record.sharded_over, record.mesh.pp):
        if axis is not None:
            total = collectives.all_reduce(total, axis, dtype=total.dtype, label="grad_norm")
    return total.sqrt().squeeze(0)


def _sum_own_squares(model: nn.Module, tp_rank: int) -> Tensor:
    """Sum of squares, `[1]`, of the gradients that `tp_rank` counts."""
    ownership, repeated = ownership_of(model), repeated_in(model)
    grads = {name: local_of(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads.values()) else torch.float32
    counted = [grad for name, grad in grads.items() if ownership[name].is_counted_on(tp_rank) and name not in repeated]
    device = next(model.parameters()).device
    total = torch.zeros(1, dtype=dtype, device=device)
    for alike in _group_by_dtype(counted):
        norms = torch._foreach_norm(alike, 2, dtype=dtype)
        total += torch.stack(list(norms)).square_().sum()
    return total


def _group_by_dtype(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of like gradients, which the multi-tensor kernels want."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    return list(groups.values())
