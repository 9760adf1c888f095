"""How one linear is quantized wherever it is in a run: its schemes, and the random numbers that these go by."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.config.recipe import HADAMARD, Recipe
from plait.contract.quantization import Orientation
from plait.errors import ShardingError
from plait.parallel.rng import bernoulli_mask, derive_key, fraction_
from plait.quant.history import LinearHistory
from plait.quant.linear import QuantizedLinear
from plait.quant.scheme import Scheme
from plait.sharding import Interval


@dataclass(frozen=True)
class GradientNoise:
    """What the gradient of one linear's output is rounded by: a function of seed, name, token and feature.

    Attributes:
        first_row: of the run, the token of the first row of the gradient.
        features: which of `width` this rank has.
    """

    seed: int
    name: str
    first_row: int
    features: Interval
    width: int

    def draw(self, orientation: Orientation, shape: Sequence[int], device: torch.device) -> Tensor:
        """Float32 numbers in [0, 1), one for each element of the gradient `[T, N]`.

        Raises:
            ShardingError: it has other features than those of this rank.
        """
        num_rows, num_features = shape
        if num_features != len(self.features):
            raise ShardingError(f"{self.name}: a gradient {list(shape)} is not of features {self.features}")
        rows = Interval(self.first_row, self.first_row + num_rows)
        key = derive_key(self.seed, "rounding", self.name, orientation)
        noise = torch.empty(num_rows, num_features, device=device)
        return fraction_(noise, key, (rows, self.features), (rows.stop, self.width))


def draw_signs(seed: int, device: torch.device | str) -> Tensor:
    """Those of the Hadamard transform, float32 `[16]`: the same for all linears, which may read one input."""
    order = Interval(0, HADAMARD)
    is_negative = bernoulli_mask(derive_key(seed, "hadamard"), (order,), (HADAMARD,), 0.5, device=device)
    return 1.0 - 2.0 * is_negative.float()


@dataclass
class LinearScheme:
    """How one linear is quantized; what is drawn depends on the seed and on the place in the run, once these are known.

    Attributes:
        name: of the module.
        features: of the `width` output features, those whose gradient this rank has.
        module: the linear itself, where one rank has all of it.
    """

    name: str
    recipe: Recipe
    device: torch.device
    features: Interval
    width: int
    history: LinearHistory | None = None
    module: QuantizedLinear | None = None
    first_token: int | None = None
    _seed: int | None = field(default=None, repr=False)
    _signs: Tensor | None = field(default=None, repr=False)

    def seed(self, seed: int) -> None:
        """Key all that is drawn."""
        self._seed = seed
        self._signs = draw_signs(seed, self.device) if self.recipe.hadamard else None
        self._hand_on()

    def set_first_token(self, first_token: int) -> None:
        """Say which token of the run the next forward's first one is."""
        self.first_token = first_token
        self._hand_on()

    def build(self, first_row: int = 0) -> Scheme:
        """What holds for the forward pass that starts now, and its backward; `first_row` of its tokens is the first."""
        noise = None
        if self._seed is not None and self.first_token is not None and self.recipe.stochastic_rounding:
            noise = GradientNoise(self._seed, self.name, self.first_token + first_row, self.features, self.width)
        return Scheme(self.name, self.recipe, self.history, noise, self._signs)

    def _hand_on(self) -> None:
        if self.module is not None:
            scheme = self.build()
            self.module.history, self.module.noise, self.module.signs = scheme.history, scheme.noise, scheme.signs

    def attach(self, module: QuantizedLinear) -> None:
        """Let the linear that one rank has all of go by this."""
        self.module = module
        self._hand_on()
