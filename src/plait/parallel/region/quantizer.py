"""Between tensors and the GEMMs of a region: what these read of them, what moves, and what is kept for backward."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from plait.parallel.region.activation import ActivationGradient
from plait.parallel.region.matrix import Factor, Matrix, flatten


class Needs(NamedTuple):
    """Which gradients are wanted: of the input, of every weight and of every bias.

    Attributes:
        is_recorded: whether autograd looks on, so that this is training, even where all of it is frozen.
    """

    x: bool
    weights: Sequence[bool]
    biases: Sequence[bool]
    is_recorded: bool = True


class Kept(NamedTuple):
    """What a forward pass leaves to its backward, beside what autograd keeps.

    Attributes:
        memory: what the quantizer has to know again.
        shape: of the input.
        num_rows: T, of all ranks.
    """

    memory: Any
    shape: torch.Size
    num_rows: int


class Reading(NamedTuple):
    """What the GEMM of a forward pass reads, and what its backward will be given.

    Attributes:
        weights: `[N, K]` of each linear.
        kept: of the input, for wgrad; None where that is not wanted.
        memory: what else backward has to know, nothing that is large.
    """

    x: Matrix
    weights: Sequence[Factor]
    kept: Tensor | None
    memory: Any


class GradientReading(NamedTuple):
    """What the GEMMs of a backward pass read of the gradients of outputs; None of one that nobody sent.

    Attributes:
        dgrad: what it reads.
        wgrad: what it reads.
        biases: what is summed for them.
        activation: what has yet to fill rows of them before these are read.
    """

    dgrad: Sequence[Matrix | None]
    wgrad: Sequence[Matrix | None]
    biases: Sequence[Matrix | None]
    activation: ActivationGradient | None


class Quantizer(Protocol):
    """What the linears of one boundary read."""

    def read(self, x: Tensor, num_rows: int, weights: Sequence[Tensor], needs: Needs) -> Reading:
        """For forward; every rank has to, as scales may have to be agreed on. `x` may have any leading dims."""

    def read_again(
        self, kept: Tensor | None, memory: Any, weights: Sequence[Tensor], needs: Needs
    ) -> tuple[Matrix | None, Sequence[Factor]]:
        """The input for wgrad, if that is wanted, and the weights for dgrad."""

    def read_gradients(
        self,
        grads: Sequence[Tensor | None],
        memory: Any,
        needs: Needs,
        activation: ActivationGradient | None,
    ) -> GradientReading:
        """For dgrad, wgrad and biases, every gradient `[T, N]`; every rank has to. `activation` is yet to fill them."""


class PlainQuantizer:
    """Leaves every tensor as it is."""

    def read(self, x: Tensor, num_rows: int, weights: Sequence[Tensor], needs: Needs) -> Reading:
        """The tensors themselves."""
        return Reading(flatten(x), weights, x, None)

    def read_again(
        self, kept: Tensor | None, memory: Any, weights: Sequence[Tensor], needs: Needs
    ) -> tuple[Matrix | None, Sequence[Factor]]:
        """The tensors themselves."""
        assert kept is not None
        return flatten(kept), weights

    def read_gradients(
        self,
        grads: Sequence[Tensor | None],
        memory: Any,
        needs: Needs,
        activation: ActivationGradient | None,
    ) -> GradientReading:
        """The tensors themselves, filled when rows of them are wanted."""
        return GradientReading(grads, grads, grads, activation)


PLAIN = PlainQuantizer()
