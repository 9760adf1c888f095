"""Activations that read what column linears give, element by element: of all rows at once or of some at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from plait.comm.autograd.once import once_differentiable
from plait.parallel.region.matrix import take_rows
from plait.sharding import Interval


class Activated(Protocol):
    """Where activations may be ready: a gather group, whose chunks are activated as their rows complete."""

    def find_activated(self, inputs: tuple[Tensor, ...]) -> Tensor | None: ...


class PointwiseActivation(nn.Module):
    """A function of one or more tensors of one shape, element by element, that keeps nothing but those for backward.

    A subclass says what it computes and how its gradients are computed, both into memory that is given: of a gather
    group that memory is rows of tensors in the making.

    Attributes:
        num_inputs: how many tensors it reads.
        group: the gather group whose outputs it reads, if any.
    """

    num_inputs: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.group: Activated | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        """What is ready where the group has computed it, else computed now."""
        ready = None if self.group is None else self.group.find_activated(inputs)
        if ready is not None:
            return ready
        # A compiler chooses what to keep by itself.
        return self.compute(*inputs) if torch.compiler.is_compiling() else PointwiseFunction.apply(self, *inputs)

    def compute(self, *inputs: Tensor, out: Tensor | None = None) -> Tensor:
        """The function, differentiable where no `out` is given."""
        raise NotImplementedError(type(self).__name__)

    def compute_gradients(self, grad: Tensor, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """The gradient of each input, into its `out`."""
        raise NotImplementedError(type(self).__name__)


class PointwiseFunction(torch.autograd.Function):
    """An activation on its own, which keeps what it reads and nothing else: `silu(gate)` costs less than its memory."""

    @staticmethod
    def forward(ctx: Any, activation: PointwiseActivation, *inputs: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(*inputs)
        return activation.compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        outs = [torch.empty_like(each) for each in inputs]
        ctx.activation.compute_gradients(grad, inputs, outs)
        return (None, *outs)


@dataclass(frozen=True)
class ActivationGradient:
    """The gradients of the members' outputs `[T, F/tp]`, through the activation behind them, some rows at a time.

    Attributes:
        grad: of the activation's output.
        inputs: what it read.
        others: what other readers of the outputs sent back.
        grads: filled with the sums.
    """

    activation: PointwiseActivation
    grad: Tensor
    inputs: Sequence[Tensor]
    others: Sequence[Tensor | None]
    grads: Sequence[Tensor]

    def fill(self, rows: Interval) -> None:
        """Compute `rows`."""
        outs = [take_rows(grad, rows) for grad in self.grads]
        inputs = [take_rows(each, rows) for each in self.inputs]
        self.activation.compute_gradients(take_rows(self.grad, rows), inputs, outs)
        for out, other in zip(outs, self.others, strict=True):
            if other is not None:
                out.add_(take_rows(other, rows))
