"""The local GEMMs of parallel linears, some rows at a time, as collective GEMMs call them.

Rows are tokens, flattened. `full` is what was gathered and `partial` where rows go that are to be summed over ranks;
each is None where the boundary moves nothing that way, and the rank has or keeps the rows itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from plait.parallel.region.activation import ActivationGradient, PointwiseActivation
from plait.sharding import Interval


@dataclass(frozen=True)
class ColumnForward:
    """`y = x @ w.T + bias` for every member of a gather group, and the activation of these while they are in cache."""

    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    outputs: Sequence[Tensor]
    activation: PointwiseActivation | None
    activated: Tensor | None

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        operand = _take(self.x if full is None else full, rows)
        for weight, bias, output in zip(self.weights, self.biases, self.outputs, strict=True):
            _multiply(operand, weight.T, bias, out=_take(output, rows))
        if self.activation is not None and self.activated is not None:
            self.activation.compute(*(_take(y, rows) for y in self.outputs), out=_take(self.activated, rows))

    @property
    def factors(self) -> list[Tensor]:
        """One for each member."""
        return [weight.T for weight in self.weights]

    def put(self, products: Sequence[Tensor]) -> None:
        """Add the biases on the way to where the outputs are wanted, and activate them all at once."""
        for product, bias, output in zip(products, self.biases, self.outputs, strict=True):
            _put(product, bias, out=output)
        if self.activation is not None and self.activated is not None:
            self.activation.compute(*self.outputs, out=self.activated)


@dataclass(frozen=True)
class ColumnDgrad:
    """`dx = sum of dy @ w` over the members, and what the gathered input's other readers sent back.

    Where `activation` is given, it fills the rows of `dy` first.
    """

    grads: Sequence[Tensor | None]
    weights: Sequence[Tensor]
    grad_x_full: Tensor | None
    activation: ActivationGradient | None

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert partial is not None
        if self.activation is not None:
            self.activation.fill(rows)
        out, addend = _take(partial, rows), None if self.grad_x_full is None else _take(self.grad_x_full, rows)
        for grad, weight in zip(self.grads, self.weights, strict=True):
            if grad is not None:
                _multiply(_take(grad, rows), weight, addend, out=out)
                addend = out
        if addend is None:
            out.zero_()
        elif addend is not out:
            out.copy_(addend)

    @property
    def is_product(self) -> bool:
        """Not where the gathered input's other readers sent something back, or nobody anything."""
        return self.grad_x_full is None and any(grad is not None for grad in self.grads)

    def build_product(self) -> tuple[Tensor, Tensor]:
        """`[dy, ...] @ [w; ...]`, so that there is one reduction for all members."""
        present = [(grad, weight) for grad, weight in zip(self.grads, self.weights, strict=True) if grad is not None]
        if self.activation is not None:
            self.activation.fill(Interval(0, present[0][0].shape[0]))
        grads, weights = zip(*present, strict=True)
        return (grads[0], weights[0]) if len(present) == 1 else (torch.cat(grads, dim=1), torch.cat(weights))


@dataclass(frozen=True)
class ColumnWgrad:
    """`dw = dy.T @ x` for every member whose weight wants it.

    Where `activation` is given, because no dgrad has run before, it fills the rows of `dy` first.
    """

    x: Tensor
    grads: Sequence[Tensor | None]
    grad_weights: Sequence[Tensor | None]
    activation: ActivationGradient | None

    @classmethod
    def build(
        cls,
        x: Tensor,
        grads: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        needs: Sequence[bool],
        activation: ActivationGradient | None,
    ) -> Self:
        """With room for the gradients that are wanted and exist."""
        wanted = [
            torch.empty_like(weight) if need and grad is not None else None
            for weight, need, grad in zip(weights, needs, grads, strict=True)
        ]
        return cls(x, grads, wanted, activation)

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        if self.activation is not None:
            self.activation.fill(rows)
        operand = _take(self.x if full is None else full, rows)
        for grad, grad_weight in zip(self.grads, self.grad_weights, strict=True):
            if grad is not None and grad_weight is not None:
                _multiply(_take(grad, rows).T, operand, grad_weight if accumulates else None, out=grad_weight)


@dataclass(frozen=True)
class RowForward:
    """`y = x @ w.T`, an addend."""

    x: Tensor
    weight: Tensor

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert partial is not None
        _multiply(_take(self.x, rows), self.weight.T, None, out=_take(partial, rows))

    @property
    def is_product(self) -> bool:
        """Always: the bias is for the sum."""
        return True

    def build_product(self) -> tuple[Tensor, Tensor]:
        """Nothing is to be made ready."""
        return self.x, self.weight.T


@dataclass(frozen=True)
class RowDgrad:
    """`dx = dy @ w`."""

    grad_y: Tensor
    weight: Tensor
    grad_x: Tensor | None

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert self.grad_x is not None
        operand = _take(self.grad_y if full is None else full, rows)
        _multiply(operand, self.weight, None, out=_take(self.grad_x, rows))

    @property
    def factors(self) -> list[Tensor]:
        """The weight."""
        return [self.weight]

    def put(self, products: Sequence[Tensor]) -> None:
        """Where the gradient is wanted."""
        assert self.grad_x is not None
        (product,) = products
        _put(product, None, out=self.grad_x)


@dataclass(frozen=True)
class RowWgrad:
    """`dw = dy.T @ x`."""

    grad_y: Tensor
    x: Tensor
    grad_weight: Tensor | None

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert self.grad_weight is not None
        operand = _take(self.grad_y if full is None else full, rows).T
        _multiply(operand, _take(self.x, rows), self.grad_weight if accumulates else None, out=self.grad_weight)


def _take(x: Tensor, rows: Interval) -> Tensor:
    # Slicing costs as much as a small GEMM.
    return x if len(rows) == x.shape[0] else x.narrow(0, rows.start, len(rows))


def _put(product: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    if bias is None:
        out.copy_(product)
    else:
        torch.add(product, bias, out=out)


def _multiply(a: Tensor, b: Tensor, addend: Tensor | None, *, out: Tensor) -> None:
    if addend is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(addend, a, b, out=out)
