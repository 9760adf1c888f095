"""Which kernel multiplies, and what is said about it."""

from dataclasses import replace
from typing import Any

import pytest

from plait.config.recipe import RECIPES, Operand
from plait.errors import ConfigError
from plait.quant.select import check_strict, select_kernels

HOPPER, BLACKWELL = (9, 0), (10, 0)
FP8, MXFP8, NVFP4 = (RECIPES[name] for name in ("fp8_currentscaling", "mxfp8", "nvfp4"))


def select(recipe: Any, capability: tuple[int, int] | None, *, sums_in_float64: bool = False) -> dict[str, str]:
    device_type = "cpu" if capability is None else "cuda"
    choices = select_kernels(recipe, device_type=device_type, capability=capability, sums_in_float64=sums_in_float64)
    return {gemm: f"{choice.kernel}: {choice.reason}" for gemm, choice in choices.items()}


@pytest.mark.parametrize(
    ("recipe", "capability", "kernel"),
    [
        (FP8, (8, 0), "emulation"),
        (FP8, (8, 9), "native"),
        (FP8, HOPPER, "native"),
        (FP8, (12, 0), "native"),
        (MXFP8, HOPPER, "emulation"),
        (MXFP8, BLACKWELL, "native"),
        (NVFP4, HOPPER, "emulation"),
        (NVFP4, BLACKWELL, "native"),
        *((recipe, None, "emulation") for recipe in (FP8, MXFP8, NVFP4)),
    ],
)
def test_a_device_has_kernels_from_some_generation_on(recipe: Any, capability: Any, kernel: str) -> None:
    assert {choice.partition(":")[0] for choice in select(recipe, capability).values()} == {kernel}


def test_reasons_have_the_values() -> None:
    assert select(FP8, None)["dgrad"] == "emulation: cpu has no kernel for e5m2 x e4m3"
    assert select(NVFP4, HOPPER)["forward"] == (
        "emulation: e2m1 x e2m1 in blocks of 16 has a kernel from sm_100 on, and this is sm_90"
    )
    assert select(MXFP8, BLACKWELL)["wgrad"] == "native: torch's scaled_mm on sm_100"


def test_no_kernel_multiplies_e5m2_with_itself() -> None:
    recipe = replace(FP8, input=Operand("e5m2", "current"))
    choices = select(recipe, HOPPER)
    assert choices["forward"].startswith("native")
    assert choices["dgrad"].startswith("native")
    assert choices["wgrad"] == "emulation: cuBLAS multiplies e5m2 with e4m3 only, not with itself"


def test_blocks_of_32_are_multiplied_in_e4m3_only() -> None:
    choices = select(replace(MXFP8, gradient=Operand("e5m2", "block32")), BLACKWELL)
    assert choices["forward"].startswith("native")
    assert choices["dgrad"] == (
        "emulation: torch's kernel for blocks of 32 multiplies e4m3 with e4m3 only, not e5m2 x e4m3 in blocks of 32"
    )


def test_no_kernel_multiplies_blocks_with_other_blocks() -> None:
    choices = select(replace(MXFP8, gradient=Operand("e4m3", "current")), BLACKWELL)
    assert choices["forward"].startswith("native")
    assert choices["wgrad"] == ("emulation: no kernel multiplies e4m3 of one scale by e4m3 in blocks of 32")


def test_no_kernel_sums_in_float64() -> None:
    choices = select(FP8, HOPPER, sums_in_float64=True)
    assert set(choices.values()) == {"emulation: no kernel sums products of codes in float64"}


def test_strict_refuses_every_emulated_product_by_name() -> None:
    recipe = replace(FP8, input=Operand("e5m2", "current"))
    choices = select_kernels(recipe, device_type="cuda", capability=HOPPER, sums_in_float64=False)
    with pytest.raises(ConfigError, match="quantization.strict: layers.1.mlp.down would be emulated: wgrad: cuBLAS"):
        check_strict("layers.1.mlp.down", choices)
    everywhere = select_kernels(FP8, device_type="cpu", capability=None, sums_in_float64=False)
    with pytest.raises(ConfigError, match="3 problems"):
        check_strict("layers.1.mlp.down", everywhere)
    check_strict("layers.1.mlp.down", select_kernels(FP8, device_type="cuda", capability=HOPPER, sums_in_float64=False))
