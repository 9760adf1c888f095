"""How far a computed step is from the exact one, tensor by tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.config.train import TrainConfig


@dataclass(frozen=True)
class Step:
    """What one training step computed: whole tensors, parameters by fully qualified name."""

    logits: Tensor
    loss: Tensor
    gradients: Mapping[str, Tensor]
    """Before clipping."""
    gradient_norm: Tensor
    updated: Mapping[str, Tensor]
    """Parameters after one optimizer step."""


@dataclass(frozen=True)
class Measure:
    """Compares steps with the exact one.

    An error is that of the worst element, relative to the element or to the root mean square of its row or tensor,
    whichever is largest. (Rounding in an element grows with what its sum is made of, which its row shows: few rows of
    an embedding's gradient are large.) Two kinds of tensors need a larger scale, because rounding elsewhere moves them
    by more than their own size:

    * The gradient of a bias may cancel: that of a key bias is exactly zero, as softmax ignores what all keys have in
      common. It is measured in units of its module's weight gradient, which sums the same terms without cancelling.
    * Adam's first step is the gradient's sign wherever the gradient is larger than eps, so an element whose gradient is
      within rounding of zero may step either way. An updated parameter is allowed the movement that a gradient error of
      `budget` can cause, besides its own rounding.
    """

    exact: Step
    train: TrainConfig
    budget: float

    def errors(self, step: Step) -> Iterator[tuple[str, str, float]]:
        """Quantity, name and error of every tensor of `step`."""
        exact = self.exact
        yield "logits", "logits", worst_error(step.logits, exact.logits)
        yield "loss", "loss", worst_error(step.loss, exact.loss)
        for name, gradient in step.gradients.items():
            yield "gradient", name, worst_error(gradient, exact.gradients[name], self._gradient_scale(name))
        yield "gradient norm", "gradient norm", worst_error(step.gradient_norm, exact.gradient_norm)
        for name, param in step.updated.items():
            yield "update", name, worst_error(param, exact.updated[name], self._update_scale(name))

    def _gradient_scale(self, name: str) -> Tensor:
        own = _typical(self.exact.gradients[name])
        weight = self.exact.gradients.get(f"{name.removesuffix('.bias')}.weight")
        return own if weight is None else own.clamp(min=_rms(weight))

    def _update_scale(self, name: str) -> Tensor:
        own = _typical(self.exact.updated[name])
        norm, most = float(self.exact.gradient_norm), self.train.max_grad_norm
        clip = min(1.0, most / norm) if most else 1.0
        gradient = self.exact.gradients[name] * clip
        error = self._gradient_scale(name) * clip * self.budget
        lowest, middle, highest = (derive_direction(gradient + shift, self.train.eps) for shift in (-error, 0, error))
        reach = torch.maximum(highest - middle, middle - lowest)
        return own + self.train.learning_rate * reach / self.budget


def derive_direction(gradient: Tensor, eps: float) -> Tensor:
    """Adam's first step in units of the learning rate: both bias-corrected moments are the gradient's own."""
    return gradient / (gradient.abs() + eps)


def find_distance(actual: Tensor, exact: Tensor) -> float:
    """How far a tensor as a whole is from another, relative to it: the norm of the difference over its norm."""
    difference, norm = float((actual.double() - exact).norm()), float(exact.norm())
    return difference / norm if norm else float("inf") if difference else 0.0


def worst_error(actual: Tensor, exact: Tensor, scale: Tensor | None = None) -> float:
    """The largest deviation of an element in units of `scale`; infinite for a wrong shape, a NaN, or a zero missed."""
    if actual.shape != exact.shape:
        return float("inf")
    deviation = (actual.double() - exact).abs()
    scale = _typical(exact) if scale is None else scale
    relative = torch.where(deviation == 0, torch.zeros_like(deviation), deviation / scale)
    return float(relative.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if relative.numel() else 0.0


def _typical(exact: Tensor) -> Tensor:
    typical = exact.abs().clamp(min=_rms(exact))
    return typical if exact.dim() < 2 else torch.maximum(typical, exact.square().mean(-1, keepdim=True).sqrt())


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())
