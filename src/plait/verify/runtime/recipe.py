"""What a precision recipe changes in a verification.

A quantizer is a staircase. Addends summed in another order end a rounding apart, and of two numbers that lie a rounding
apart at the edge of a step one may become the next code: under a recipe a float32 model and its twin differ by whole
steps here and there, and no budget tells that from a mistake. So both sides compute in float64, down to what they
reduce in. Quantizers see float32, in which a difference of 1e-15 shows only if it crosses the middle between two
float32 numbers, once in 1e8, and then changes a code only if that is a step's edge too. What is left is the budget of
float64, and sharding may change no quantized value.
"""

from dataclasses import dataclass

from plait.config.quantization import QuantizationConfig
from plait.config.run import RunConfig


@dataclass(frozen=True)
class Phase:
    """One forward and backward pass of a verification.

    Attributes:
        name: what its quantities are called by, beside the first one's.
        index: of its batch.
    """

    name: str = ""
    index: int = 0

    def label(self, quantity: str) -> str:
        """`logits` -> `calibrated logits`."""
        return f"{self.name} {quantity}".strip()


FIRST = Phase()
CALIBRATED = Phase("calibrated", 1)
"""The pass after the first update of histories, on another batch: at the old one they would say nothing new."""


def list_phases(config: RunConfig) -> tuple[Phase, ...]:
    """One, or with delayed scaling two."""
    recipe = config.quantization.resolved
    return (FIRST, CALIBRATED) if recipe is not None and recipe.is_delayed else (FIRST,)


def choose_precision(config: RunConfig) -> RunConfig:
    """The run as it is compared with its twin: with a recipe, in float64, which no user can choose."""
    if config.quantization.resolved is None:
        return config
    precision = config.precision.model_copy(update={"compute": "float64", "reduce": None})
    return config.model_copy(update={"precision": precision})


def drop_recipe(config: RunConfig) -> RunConfig:
    """The same run with nothing quantized."""
    return config.model_copy(update={"quantization": QuantizationConfig()})


def choose_exact_scales(config: RunConfig) -> RunConfig:
    """The run whose products of integers are exact: scales of tensors are powers of two.

    Codes have at most four bits, and so have the scales of blocks, so float64 holds any sum of their products. A scale
    that is no power of two would round each rank's addend.
    """
    asked = config.quantization.resolved
    if asked is None or not any(operand.has_tensor_scale for operand in asked.operands.values()):
        return config
    changed = {**config.quantization.model_dump(exclude_unset=True), "power_of_two_scales": True}
    return config.model_copy(update={"quantization": QuantizationConfig.model_validate(changed)})


def find_quantized_block(config: RunConfig) -> int:
    """The first block that is quantized, or simply the first."""
    return 0 if config.quantization.resolved is None else config.quantization.keep_first
