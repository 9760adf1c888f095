"""Which linears of a run are quantized, and by which recipe."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from plait.config.recipe import HADAMARD, NAMES, RECIPES, NumberFormat, Operand, Recipe, RecipeName, Scaling
from plait.config.section import Problem, Section

SHORTHAND = "recipe"
"""The key that a plain value stands for: `quantization = "mxfp8"` is short for `quantization.recipe = "mxfp8"`."""

_MAX_HISTORY = 65_536


class OperandConfig(Section):
    """What of a tensor differs from the recipe."""

    format: NumberFormat | None = None
    """`e4m3`, `e5m2` or `e2m1`."""
    scaling: Scaling | None = None
    """One scale by the `current` or `delayed` largest magnitude, or one for each `block32` or `block16`."""

    def change(self, operand: Operand) -> Operand:
        """What `operand` becomes."""
        return Operand(self.format or operand.format, self.scaling or operand.scaling)


class QuantizationConfig(Section):
    """Precision recipe of the linears; a plain `quantization = "mxfp8"` is short for `recipe`."""

    recipe: RecipeName = "none"
    """`none`, or what the keys below change in part."""
    layers: Literal["all", "mlp_only"] = "all"
    """Every linear inside the blocks, or those of the MLPs."""
    keep_first: Annotated[int, Field(ge=0)] = 1
    """So many of the first blocks stay in `precision.compute`."""
    keep_last: Annotated[int, Field(ge=0)] = 1
    """So many of the last ones."""
    head: bool = False
    """Whether the linear to the vocabulary is quantized too."""
    input: OperandConfig = OperandConfig()
    """What of the recipe is otherwise for inputs."""
    weight: OperandConfig = OperandConfig()
    """For weights."""
    gradient: OperandConfig = OperandConfig()
    """For gradients of outputs."""
    margin: Annotated[int | None, Field(ge=0, le=32)] = None
    """By how many powers of two delayed scales stay below what their history allows."""
    amax_history: Annotated[int | None, Field(ge=1, le=_MAX_HISTORY)] = None
    """How many steps delayed scales look back."""
    power_of_two_scales: bool | None = None
    """Scales of whole tensors are powers of two, rounded down."""
    stochastic_rounding: bool | None = None
    """Of gradients."""
    hadamard: bool | None = None
    """Mix what wgrad contracts in sixteens of tokens by a random Hadamard matrix."""
    strict: bool = False
    """Refuse a device that has no instruction for the recipe, instead of emulating it."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return {SHORTHAND: value} if isinstance(value, str) else value

    @cached_property
    def resolved(self) -> Recipe | None:
        """The recipe with what the run changes of it; None where nothing is quantized."""
        if self.recipe == "none":
            return None
        named = RECIPES[self.recipe]
        changed = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        operands = {name: getattr(self, name).change(operand) for name, operand in named.operands.items()}
        recipe = replace(named, **operands, **changed)
        return recipe if recipe == named else replace(recipe, name=f"{named.name}, changed")

    def conflicts(self) -> Iterator[Problem]:
        """What cannot be, or would have no effect."""
        recipe = self.resolved
        if recipe is None:
            for name in [] if SHORTHAND in self.model_fields_set else sorted(self.model_fields_set):
                recipes = ", ".join(NAMES[1:])
                yield Problem(name, "nothing is quantized unless recipe says how", f"recipes are {recipes}")
            return
        for name, operand in recipe.operands.items():
            yield from _list_operand_conflicts(name, operand)
        if not recipe.is_delayed:
            for name in ("amax_history", "margin"):
                if getattr(self, name) is not None:
                    yield Problem(name, "only delayed scaling looks back at earlier steps")
        if recipe.hadamard and not (recipe.input.block and recipe.gradient.block):
            text = "mixes sixteens of tokens for wgrad, which quantizes input and gradient in blocks"
            yield Problem("hadamard", text, f"use scaling = block16 or block32, or leave it out ({HADAMARD} tokens)")


_OPTIONS = ("margin", "amax_history", "power_of_two_scales", "stochastic_rounding", "hadamard")


def _list_operand_conflicts(name: str, operand: Operand) -> Iterator[Problem]:
    if operand.format == "e2m1" and operand.block is None:
        text = f"format e2m1 has 8 magnitudes, too few for one scale of a whole tensor ({operand.scaling})"
        yield Problem(f"{name}.scaling", text, "use block16 or block32")
    if operand.scaling == "block16" and operand.format != "e2m1":
        yield Problem(f"{name}.scaling", f"block16 is for format e2m1, not {operand.format}", "use block32")
