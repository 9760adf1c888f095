"""The norm of all gradients, every element of the unsharded model counted once, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from plait.comm import collectives
from plait.parallel.apply import ownership_of, record_of, repeated_in
from plait.parallel.fsdp.local import local_of


class GradNorm:
    """The norm of the gradients of a model whose parameters stay: which of them this rank counts is found once."""

    def __init__(self, model: nn.Module) -> None:
        record = record_of(model)
        rank = 0 if record is None else record.mesh.tp.rank
        ownership, repeated = ownership_of(model), repeated_in(model)
        self._params = [
            (param, ownership[name].is_counted_on(rank) and name not in repeated)
            for name, param in model.named_parameters()
        ]
        self._device = next(model.parameters()).device
        axes = () if record is None else (record.mesh.tp, record.sharded_over, record.mesh.pp)
        self._axes = [axis for axis in axes if axis is not None]

    @torch.no_grad()
    def clip_(self, max_norm: float) -> Tensor:
        """As `clip_grad_norm_`."""
        norm = self.compute()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in _group_by_dtype(grad for grad, _ in self._list_gradients()):
            torch._foreach_mul_(grads, scale)
        return norm

    @torch.no_grad()
    def compute(self) -> Tensor:
        """As `compute_grad_norm`."""
        total = self._sum_own_squares()
        for axis in self._axes:
            total = collectives.all_reduce(total, axis, dtype=total.dtype, label="grad_norm")
        return total.sqrt().squeeze(0)

    def _list_gradients(self) -> list[tuple[Tensor, bool]]:
        """Those there are, and whether this rank counts them."""
        return [(local_of(param.grad), is_counted) for param, is_counted in self._params if param.grad is not None]

    def _sum_own_squares(self) -> Tensor:
        """Sum of squares, `[1]`, of the gradients that this rank counts."""
        grads = self._list_gradients()
        dtype = torch.float64 if any(grad.dtype == torch.float64 for grad, _ in grads) else torch.float32
        total = torch.zeros(1, dtype=dtype, device=self._device)
        for alike in _group_by_dtype(grad for grad, is_counted in grads if is_counted):
            norms = torch._foreach_norm(alike, 2, dtype=dtype)
            total += torch.stack(list(norms)).square_().sum()
        return total


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before, the same on every rank.

        forward    all_reduce sum [1] over tp, over the ranks that share parameters out, and over pp

    Which rank counts a replicated parameter is read off its ownership, so the norm is that of the unsharded model at
    every degree. It is accumulated in float32 (float64 where a gradient is float64). Gradients must be summed over dp
    already; over tp each layer has done that itself. A norm that is not finite makes all gradients so, as in torch.
    """
    return GradNorm(model).clip_(max_norm)


def compute_grad_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients of the unsharded model, the same on every rank."""
    return GradNorm(model).compute()


def _group_by_dtype(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of like gradients, which the multi-tensor kernels want."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    return list(groups.values())
