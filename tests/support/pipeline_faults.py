"""Mistakes with stages, made on purpose inside the ranks, each of which a verification has to find."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import collectives, trace
from plait.comm.mesh import Axis
from plait.parallel import grad_norm
from plait.parallel.pipeline import stage
from plait.parallel.pipeline.stage import RunningStage
from plait.sharding import Kind
from plait.train.pipeline import PipelineTrainer


class FaultyRanks:
    """Ranks on which every call makes one of `FAULTS`."""

    def __init__(self, ranks: Any, fault: str) -> None:
        self._ranks = ranks
        self._fault = fault

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run `function` on every rank."""
        return self._ranks.call(run_faulty, fault=self._fault, wrapped=function, arguments=kwargs)


def run_faulty(fault: str, wrapped: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run `wrapped` on this rank with a mistake."""
    with FAULTS[fault]():
        return wrapped(**arguments)


@contextmanager
def _keep_addend(label: str, axis_name: str) -> Iterator[None]:
    """Record a sum and leave it out."""
    all_reduce = collectives.all_reduce

    def skip(x: Tensor, axis: Axis, **options: Any) -> Tensor:
        if options.get("label") != label or axis.name != axis_name:
            return all_reduce(x, axis, **options)
        trace.issue(Kind.ALL_REDUCE, axis, x.shape, options.get("dtype") or x.dtype, 0, "sum", label)
        return x

    with patch.object(collectives, "all_reduce", skip):
        yield


def _count_tied_twice() -> AbstractContextManager[Any]:
    return patch.object(grad_norm, "repeated_in", lambda _: frozenset())


@contextmanager
def _send(name: str, spoil: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Send something else than what was computed."""
    build = getattr(RunningStage, name)

    def send(self: RunningStage, micro_batch: int) -> list[dist.P2POp]:
        ops: list[dist.P2POp] = build(self, micro_batch)
        for op in ops:
            op.tensor = spoil(micro_batch, op.tensor)
        return ops

    with patch.object(RunningStage, name, send):
        yield


def _spoil_second(micro_batch: int, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if micro_batch == 1 else x


@contextmanager
def _draw_masks_of_the_first() -> Iterator[None]:
    go_on = PipelineTrainer._go_on_with
    with patch.object(PipelineTrainer, "_go_on_with", lambda self, _: go_on(self, 0)):
        yield


def _compute_both_halves_twice() -> AbstractContextManager[Any]:
    return patch.object(stage, "compute_half", lambda _: nullcontext())


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "totals of the last stage alone": lambda: _keep_addend("totals", "pp"),
    "norm of a stage": lambda: _keep_addend("grad_norm", "pp"),
    "tied gradients that are not summed": lambda: _keep_addend("tied", "pp/ends"),
    "tied gradients that count twice": _count_tied_twice,
    "an activation that is lost": lambda: _send("get_fwd_send_ops", _spoil_second),
    "a gradient that is lost": lambda: _send("get_bwd_send_ops", _spoil_second),
    "masks of the first micro-batch": _draw_masks_of_the_first,
    "both halves of backward twice": _compute_both_halves_twice,
}
