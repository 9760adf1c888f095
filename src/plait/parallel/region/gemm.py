"""The local GEMMs of parallel linears, some rows at a time, as collective GEMMs call them.

Rows are tokens, flattened. `full` is what was gathered and `partial` where rows go that are to be summed over ranks;
each is None where the boundary moves nothing that way, and the rank has or keeps the rows itself. What is multiplied
are tensors as they are, or quantized ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.parallel.region.activation import ActivationGradient, PointwiseActivation
from plait.parallel.region.matrix import Factor, Matrix, add_product, multiply, take, take_rows
from plait.sharding import Interval


class ColumnForward(NamedTuple):
    """`y = x @ w.T + bias` for every member of a gather group, and the activation of these while they are in cache."""

    x: Matrix
    weights: Sequence[Factor]
    biases: Sequence[Tensor | None]
    outputs: Sequence[Tensor]
    activation: PointwiseActivation | None
    activated: Tensor | None

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        operand = take(self.x, rows, full)
        for weight, bias, output in zip(self.weights, self.biases, self.outputs, strict=True):
            multiply(operand, weight.T, bias, out=take_rows(output, rows))
        if self.activation is not None and self.activated is not None:
            self.activation.compute(*(take_rows(y, rows) for y in self.outputs), out=take_rows(self.activated, rows))

    @property
    def factors(self) -> list[Tensor]:
        """One for each member; of tensors as they are, as other passes are not fused."""
        return [weight.T for weight in self.weights if isinstance(weight, Tensor)]

    def put(self, products: Sequence[Tensor]) -> None:
        """Add the biases on the way to where the outputs are wanted, and activate them all at once."""
        for product, bias, output in zip(products, self.biases, self.outputs, strict=True):
            _put(product, bias, out=output)
        if self.activation is not None and self.activated is not None:
            self.activation.compute(*self.outputs, out=self.activated)


class ColumnDgrad(NamedTuple):
    """`dx = sum of dy @ w` over the members, and what the gathered input's other readers sent back.

    Where `activation` is given, it fills the rows of `dy` first.
    """

    grads: Sequence[Matrix | None]
    weights: Sequence[Factor]
    grad_x_full: Tensor | None
    activation: ActivationGradient | None

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert partial is not None
        if self.activation is not None:
            self.activation.fill(rows)
        out, addend = take_rows(partial, rows), None if self.grad_x_full is None else take_rows(self.grad_x_full, rows)
        for grad, weight in zip(self.grads, self.weights, strict=True):
            if grad is not None:
                multiply(take(grad, rows), weight, addend, out=out)
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
        present = [
            (grad, weight)
            for grad, weight in zip(self.grads, self.weights, strict=True)
            if isinstance(grad, Tensor) and isinstance(weight, Tensor)
        ]
        if self.activation is not None:
            self.activation.fill(Interval(0, present[0][0].shape[0]))
        grads, weights = zip(*present, strict=True)
        return (grads[0], weights[0]) if len(present) == 1 else (torch.cat(grads, dim=1), torch.cat(weights))


class ColumnWgrad(NamedTuple):
    """`dw = dy.T @ x` for every member whose weight wants it.

    Where `activation` is given, because no dgrad has run before, it fills the rows of `dy` first.
    """

    x: Matrix | None
    grads: Sequence[Matrix | None]
    weights: Sequence[Tensor]
    needs: Sequence[bool]
    activation: ActivationGradient | None
    grad_weights: list[Tensor | None]
    """None of each before, and afterwards of those that are not wanted or do not exist."""

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        if self.activation is not None:
            self.activation.fill(rows)
        operand = take(self.x, rows, full)
        for member, (grad, weight, is_wanted) in enumerate(zip(self.grads, self.weights, self.needs, strict=True)):
            if grad is not None and is_wanted:
                total = self.grad_weights[member] if accumulates else None
                self.grad_weights[member] = add_product(total, take(grad, rows).T, operand, weight)


class RowForward(NamedTuple):
    """`y = x @ w.T`, an addend."""

    x: Matrix
    weight: Factor

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert partial is not None
        multiply(take(self.x, rows), self.weight.T, None, out=take_rows(partial, rows))

    @property
    def is_product(self) -> bool:
        """Always: the bias is for the sum."""
        return True

    def build_product(self) -> tuple[Tensor, Tensor]:
        """Nothing is to be made ready."""
        assert isinstance(self.x, Tensor), self.x
        assert isinstance(self.weight, Tensor), self.weight
        return self.x, self.weight.T


class RowDgrad(NamedTuple):
    """`dx = dy @ w`."""

    grad_y: Matrix | None
    weight: Factor
    grad_x: Tensor | None

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        assert self.grad_x is not None
        multiply(take(self.grad_y, rows, full), self.weight, None, out=take_rows(self.grad_x, rows))

    @property
    def factors(self) -> list[Tensor]:
        """The weight, as it is."""
        assert isinstance(self.weight, Tensor), self.weight
        return [self.weight]

    def put(self, products: Sequence[Tensor]) -> None:
        """Where the gradient is wanted."""
        assert self.grad_x is not None
        (product,) = products
        _put(product, None, out=self.grad_x)


class RowWgrad(NamedTuple):
    """`dw = dy.T @ x`."""

    grad_y: Matrix | None
    x: Matrix | None
    weight: Tensor
    grad_weight: list[Tensor | None]
    """Of the one weight; None before, and where it is not wanted."""

    def __call__(self, rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
        total = self.grad_weight[0] if accumulates else None
        self.grad_weight[0] = add_product(total, take(self.grad_y, rows, full).T, take(self.x, rows), self.weight)


def _put(product: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    if bias is None:
        out.copy_(product)
    else:
        torch.add(product, bias, out=out)
