"""Mistakes with what follows the tokens over context ranks, each as long as its block lasts."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from plait.contract.context.mask import AttentionMask
from plait.parallel.context import ring, sequences
from plait.parallel.context.core import ContextParallelAttention
from plait.train import step


def count_positions_from_zero() -> AbstractContextManager[Any]:
    build = lambda found, batch, device: torch.arange(found.num_own, device=device)  # noqa: E731
    return patch.object(sequences, "_build_positions", build)


def take_labels_of_another_rank() -> AbstractContextManager[Any]:
    take = step.take_own

    def take_wrongly(x: Any, order: Any, rank: int) -> Any:
        is_target = bool((x == step.IGNORE_INDEX).any())
        return take(x, order, 1 - rank if is_target else rank)

    return patch.object(step, "take_own", take_wrongly)


def keep_gradients_of_own_keys_only() -> AbstractContextManager[Any]:
    sum_all = ring._Backward.sum

    def sum_own(self: Any, wish: Any) -> None:
        sum_all(self, wish)
        if wish.owner == self.site.axis.rank:
            self.sums = {wish.owner: self.sums[wish.owner] * 0.5}

    return patch.object(ring._Backward, "sum", sum_own)


def forget_documents() -> AbstractContextManager[Any]:
    attend = ContextParallelAttention.forward

    def forward(self: ContextParallelAttention, *args: Any, **kwargs: Any) -> Any:
        found = self.mesh.sequences
        self.mesh.sequences = type(found)(found.order, found.rank, AttentionMask())
        try:
            return attend(self, *args, **kwargs)
        finally:
            self.mesh.sequences = found

    return patch.object(ContextParallelAttention, "forward", forward)
