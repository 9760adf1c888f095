"""How one linear quantizes its tensors: what a recipe leaves to the place, the step and the seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from plait.config.recipe import Recipe
from plait.contract.quantization import Orientation
from plait.errors import ConfigError, PlaitError
from plait.quant.cast import Quantized, quantize
from plait.quant.scale import derive_scale, measure_amax

TensorName = Literal["input", "weight", "gradient"]

_SAID: dict[TensorName, str] = {"input": "input", "weight": "weight", "gradient": "output's gradient"}

Scales = tuple[Tensor | None, ...]
"""One for each orientation, None where blocks have all there is."""


class AmaxHistory(Protocol):
    """The largest magnitudes of the tensors of one linear at earlier steps, for delayed scaling."""

    def note(self, tensor: TensorName, amax: Tensor) -> None:
        """Remember a float32 number for the next update."""

    def find_amax(self, tensor: TensorName) -> Tensor | None:
        """The largest in the history, a float32 number; None before the first update."""


class RoundingNoise(Protocol):
    """What gradients are rounded by: numbers that are a function of the element's place in the run.

    A backward pass uses the object that its forward pass saw: another position in the run is another object.
    """

    def draw(self, orientation: Orientation, shape: Sequence[int], device: torch.device) -> Tensor:
        """Float32 numbers in [0, 1), one for each element of the gradient `[T, N]`."""


@dataclass(frozen=True)
class Scheme:
    """How one linear quantizes its tensors.

    Attributes:
        name: of the module, for errors.
        history: of delayed scaling.
        noise: of stochastic rounding.
        signs: the random signs of the Hadamard transform, float32 `[16]`.
    """

    name: str
    recipe: Recipe
    history: AmaxHistory | None = None
    noise: RoundingNoise | None = None
    signs: Tensor | None = None

    def find_scales(
        self, tensor: TensorName, x: Tensor, orientations: tuple[Orientation, ...], *, notes: bool
    ) -> Scales:
        """The tensor's own scales, where one device has all of it.

        Raises:
            PlaitError: not all of it is finite.
        """
        return self.derive_scales(tensor, self.measure(tensor, x, orientations, notes=notes), orientations)

    def measure(self, tensor: TensorName, x: Tensor, orientations: tuple[Orientation, ...], *, notes: bool) -> Tensor:
        """The largest magnitudes that the tensor's scales go by, float32; of part of it those of the part.

        There is one, or one for each orientation where that of wgrad is mixed; none where blocks have all the scales,
        or earlier steps say them. `notes` says whether a history is to remember.

        Raises:
            PlaitError: not all of it is finite, which no magnitude would tell.
        """
        operand, signs = self.recipe.operands[tensor], self._signs_of(tensor)
        if not operand.has_tensor_scale:
            if tensor != "weight" and x.numel():
                self.check_finite(tensor, torch.stack(torch.aminmax(x.detach())))
            return x.new_empty(0, dtype=torch.float32)
        amaxes = measure_amax(x.detach(), operand, orientations[:1] if signs is None else orientations, signs=signs)
        if operand.scaling != "delayed":
            return amaxes
        history = self._require_history(tensor)
        if notes:
            history.note(tensor, amaxes.max())
        if history.find_amax(tensor) is None:
            return amaxes
        self.check_finite(tensor, amaxes)
        return amaxes[:0]

    def derive_scales(self, tensor: TensorName, amaxes: Tensor, orientations: tuple[Orientation, ...]) -> Scales:
        """The tensor's own scales from what `measure` gives, of all its parts the largest.

        Raises:
            PlaitError: a magnitude is not finite.
        """
        recipe, operand = self.recipe, self.recipe.operands[tensor]
        if not operand.has_tensor_scale:
            return (None,) * len(orientations)
        self.check_finite(tensor, amaxes)
        is_delayed = operand.scaling == "delayed"
        if is_delayed and (earlier := self._require_history(tensor).find_amax(tensor)) is not None:
            amaxes = earlier
        margin = recipe.margin if is_delayed else 0
        scales = [
            derive_scale(amax, operand, margin=margin, power_of_two=recipe.power_of_two_scales)
            for amax in amaxes.view(-1)
        ]
        return tuple(scales * (len(orientations) // len(scales)))

    def check_finite(self, tensor: TensorName, numbers: Tensor) -> None:
        """Refuse what has no scale.

        Raises:
            PlaitError: a number is infinite or none.
        """
        if not torch.isfinite(numbers).all():
            raise PlaitError(
                f"{self.name}: its {_SAID[tensor]} has values that are not finite "
                f"(quantization.recipe = {self.recipe.name})",
                hint="what is before it overflowed: lower train.learning_rate, or keep more layers in high precision",
            )

    def quantize(
        self, tensor: TensorName, x: Tensor, orientations: tuple[Orientation, ...], scales: Scales
    ) -> Quantized:
        """`x` as the GEMMs read it."""
        operand = self.recipe.operands[tensor]
        is_noisy = self.recipe.stochastic_rounding and tensor == "gradient"
        noise = tuple(self._draw(orientation, x) for orientation in orientations) if is_noisy else None
        return quantize(x, operand, orientations, scales, noise=noise, signs=self._signs_of(tensor))

    def _require_history(self, tensor: TensorName) -> AmaxHistory:
        if self.history is None:
            raise ConfigError(
                f"{self.name}: delayed scaling of the {tensor} has no history of earlier steps",
                hint="make the model with plait.parallelize(..., quantization=...)",
            )
        return self.history

    def _draw(self, orientation: Orientation, x: Tensor) -> Tensor:
        if self.noise is None:
            raise _miss_seed(self.name, "stochastic rounding has no numbers to go by")
        return self.noise.draw(orientation, x.shape, x.device)

    def _signs_of(self, tensor: TensorName) -> Tensor | None:
        """Only what wgrad contracts is mixed."""
        if tensor == "weight" or not self.recipe.hadamard:
            return None
        if self.signs is None:
            raise _miss_seed(self.name, "the Hadamard transform has no signs")
        return self.signs


def _miss_seed(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name}: {what}",
        hint="call plait.seed_dropout(model, seed) once, and plait.set_dropout_offset(model, first_token) before each "
        "forward",
    )
