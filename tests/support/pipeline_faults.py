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
from plait.parallel.fsdp import moves
from plait.parallel.pipeline import stage
from plait.parallel.pipeline.stage import RunningStage
from plait.sharding import Kind
from plait.train.pipeline import PipelineTrainer


class FaultyRanks:
    """Ranks on which every call makes one of `FAULTS` or `SHARED_FAULTS`."""

    def __init__(self, ranks: Any, fault: str) -> None:
        self._ranks = ranks
        self._fault = fault

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run `function` on every rank."""
        return self._ranks.call(run_faulty, fault=self._fault, wrapped=function, arguments=kwargs)


def run_faulty(fault: str, wrapped: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run `wrapped` on this rank with a mistake."""
    with (FAULTS | SHARED_FAULTS)[fault]():
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


@contextmanager
def _keep_own_gradients() -> Iterator[None]:
    """The second stage records the sums over dp_shard, and keeps its own addends."""
    scatter = moves.ScatterGradients.__call__

    def keep(self: Any, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> None:
        if dist.get_rank() < dist.get_world_size() // 2:
            scatter(self, output_tensor, input_tensor, *rest, **options)
            return
        axis = self.axis
        dtype = axis.reduce_dtype or input_tensor.dtype
        trace.issue(Kind.REDUCE_SCATTER, axis, input_tensor.shape, dtype, 0, "sum", moves.SUMMED)
        output_tensor.copy_(input_tensor.chunk(axis.degree)[axis.rank])

    with patch.object(moves.ScatterGradients, "__call__", keep):
        yield


@contextmanager
def _gather_own_parameters() -> Iterator[None]:
    """The second stage takes its own part of the parameters of each unit for that of every rank."""
    gather = moves.GatherParameters.__call__

    def repeat(self: Any, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> None:
        gather(self, output_tensor, input_tensor, *rest, **options)
        if dist.get_rank() >= dist.get_world_size() // 2:
            output_tensor.copy_(input_tensor.clone().repeat(self.axis.degree))

    with patch.object(moves.GatherParameters, "__call__", repeat):
        yield


def _reduce_twice() -> AbstractContextManager[Any]:
    """Each unit is summed once more, for nothing."""
    scatter = moves.ScatterGradients.__call__

    def repeat(self: Any, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> None:
        scatter(self, output_tensor.clone(), input_tensor.clone(), *rest, **options)
        scatter(self, output_tensor, input_tensor, *rest, **options)

    return patch.object(moves.ScatterGradients, "__call__", repeat)


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

SHARED_FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients of a stage that are not summed": _keep_own_gradients,
    "parameters of a stage that are not gathered": _gather_own_parameters,
    "gradients that are summed twice": _reduce_twice,
}
"""With stages that share out their parameters."""
