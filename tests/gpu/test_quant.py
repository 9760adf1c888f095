"""Quantized matrices on a CUDA device: the bits of the CPU, and products by its kernels beside their emulation.

A machine without CUDA, or a device without a kernel for a recipe, skips what it cannot run and says so.
"""

from typing import Any

import pytest
import torch

from plait.config.recipe import RECIPES, Recipe
from plait.quant.cast import Quantized
from plait.quant.matmul import multiply, prepare
from plait.quant.native import find_capability
from plait.quant.select import Gemm, Kernel, select_kernels
from tests.support.quantized_matrices import BOTH, quantize_alone

NAMES = [name for name in RECIPES if name != "fp8_delayedscaling"]
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0] * 4)
TOKENS, K, N = 192, 160, 96

KERNEL_ROUNDING = 2e-3
"""Of the largest number: Hopper's FP8 kernels keep about 14 bits of a sum of products (arXiv:2412.19437, 3.3.2)."""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")


def build(name: str, tensor: str, rows: int, width: int, device: str, *, seed: int) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.randn(rows, 1, generator=generator).mul(3).exp2()
    noise = torch.rand(rows, width, generator=generator).to(device)
    recipe, operand = RECIPES[name], RECIPES[name].operands[tensor]
    x, signs = x.to(device), SIGNS.to(device) if recipe.hadamard and tensor != "weight" else None
    is_noisy = recipe.stochastic_rounding and tensor == "gradient"
    return quantize_alone(x, operand, noise=(noise, noise) if is_noisy else None, signs=signs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tensor", ["input", "weight", "gradient"])
def test_a_device_quantizes_to_the_bits_of_the_cpu(name: str, tensor: str) -> None:
    on_cpu, on_device = (build(name, tensor, TOKENS, K, device, seed=0) for device in ("cpu", "cuda"))
    assert torch.equal(on_device.payload.cpu(), on_cpu.payload)
    for orientation in BOTH:
        ours = on_device.dequantize(orientation, torch.float64).cpu()
        assert torch.equal(ours, on_cpu.dequantize(orientation, torch.float64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_multiply_as_their_emulation_does(name: str, gemm: Gemm, dtype: torch.dtype) -> None:
    choice = _select(RECIPES[name])[gemm]
    if choice.kernel == "emulation":
        pytest.skip(choice.reason)
    native, emulated = (_multiply(name, gemm, kernel, dtype) for kernel in ("native", "emulation"))
    rounding = KERNEL_ROUNDING + (0 if dtype == torch.float32 else torch.finfo(dtype).eps)
    torch.testing.assert_close(native, emulated, rtol=0, atol=rounding * emulated.abs().max().item())


def _select(recipe: Recipe) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    capability = find_capability(device)
    return select_kernels(recipe, device_type="cuda", capability=capability, sums_in_float64=False)


def _multiply(name: str, gemm: Gemm, kernel: Kernel, dtype: torch.dtype) -> torch.Tensor:
    x = build(name, "input", TOKENS, K, "cuda", seed=0)
    w = build(name, "weight", N, K, "cuda", seed=1)
    dy = build(name, "gradient", TOKENS, N, "cuda", seed=2)
    first, second, orientations = {
        "forward": (x, w, ("rows", "rows")),
        "dgrad": (dy, w, ("rows", "columns")),
        "wgrad": (dy, x, ("columns", "columns")),
    }[gemm]
    a = prepare(first, orientations[0], torch.float32, kernel=kernel)
    b = prepare(second, orientations[1], torch.float32, kernel=kernel)
    a, b = (a.T, b) if gemm == "wgrad" else (a, b.T if gemm == "forward" else b)
    rows, columns = {"forward": (TOKENS, N), "dgrad": (TOKENS, K), "wgrad": (N, K)}[gemm]
    out = torch.full((rows, columns), torch.nan, dtype=dtype, device="cuda")
    multiply(a, b, None, out=out)
    return out
