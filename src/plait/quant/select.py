"""Which kernel multiplies two quantized matrices, and why: a function of what they are and of the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plait.config.recipe import Operand, Recipe
from plait.errors import ConfigError

Kernel = Literal["native", "emulation"]
"""The device's own on codes, or one on the exact numbers that they stand for."""

Gemm = Literal["forward", "dgrad", "wgrad"]

Capability = tuple[int, int]

_FP8_FROM: Capability = (8, 9)
_BLOCKS_FROM: Capability = (10, 0)


@dataclass(frozen=True)
class KernelChoice:
    """What multiplies, and the reason in words."""

    kernel: Kernel
    reason: str


def select_kernels(
    recipe: Recipe, *, device_type: str, capability: Capability | None, sums_in_float64: bool
) -> dict[Gemm, KernelChoice]:
    """For each GEMM of a linear under `recipe`; equal arguments give equal choices, so all ranks choose alike."""
    pairs: dict[Gemm, tuple[Operand, Operand]] = {
        "forward": (recipe.input, recipe.weight),
        "dgrad": (recipe.gradient, recipe.weight),
        "wgrad": (recipe.gradient, recipe.input),
    }
    if sums_in_float64:
        return dict.fromkeys(pairs, KernelChoice("emulation", "no kernel sums products of codes in float64"))
    return {gemm: select_kernel(a, b, device_type, capability) for gemm, (a, b) in pairs.items()}


def select_kernel(a: Operand, b: Operand, device_type: str, capability: Capability | None) -> KernelChoice:
    """For one product."""
    obstacle = _find_obstacle(a, b)
    if obstacle is not None:
        return KernelChoice("emulation", obstacle)
    if capability is None:
        return KernelChoice("emulation", f"{device_type} has no kernel for {_describe(a, b)}")
    needed = _FP8_FROM if a.block is None else _BLOCKS_FROM
    if capability < needed:
        return KernelChoice(
            "emulation", f"{_describe(a, b)} has a kernel from {_name(needed)} on, and this is {_name(capability)}"
        )
    return KernelChoice("native", f"torch's scaled_mm on {_name(capability)}")


def check_strict(name: str, choices: Mapping[Gemm, KernelChoice]) -> None:
    """What `quantization.strict` wants of linear `name`: every product by a kernel of the device.

    Raises:
        ConfigError: some are emulated; lists them all.
    """
    emulated = [f"{gemm}: {choice.reason}" for gemm, choice in choices.items() if choice.kernel == "emulation"]
    if emulated:
        raise ConfigError.from_problems(
            f"quantization.strict: {name} would be emulated",
            emulated,
            hint="leave out quantization.strict, or take a recipe that the device has kernels for",
        )


def _find_obstacle(a: Operand, b: Operand) -> str | None:
    if a.block != b.block:
        return f"no kernel multiplies {_describe_one(a)} by {_describe_one(b)}"
    formats = {a.format, b.format}
    if a.block is None and formats == {"e5m2"}:
        return "cuBLAS multiplies e5m2 with e4m3 only, not with itself"
    if a.scaling == "block32" and formats != {"e4m3"}:
        return f"torch's kernel for blocks of 32 multiplies e4m3 with e4m3 only, not {_describe(a, b)}"
    return None


def _describe(a: Operand, b: Operand) -> str:
    return f"{a.format} x {b.format}" + ("" if a.block is None else f" in blocks of {a.block}")


def _describe_one(operand: Operand) -> str:
    return f"{operand.format} " + ("of one scale" if operand.block is None else f"in blocks of {operand.block}")


def _name(capability: Capability) -> str:
    major, minor = capability
    return f"sm_{major}{minor}"
