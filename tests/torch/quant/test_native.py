"""Products of codes: what reaches the kernels of a GPU, by one of our own that reads it as cuBLAS says it does.

FP8 with a scale for each tensor also runs on CPUs, by torch's own kernel. Those of GPUs: `tests/gpu/test_quant.py`.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from plait.contract.quantization import Orientation
from plait.quant import native
from plait.quant.cast import Quantized
from plait.quant.formats import decode, decode_e8m0, unpack
from plait.quant.matmul import Factor, multiply, prepare
from plait.quant.native import find_capability, swizzle
from plait.quant.select import Kernel
from plait.sharding import Interval
from tests.support.quantized_matrices import OPERANDS, quantize_alone

SCALES = {torch.float8_e8m0fnu: (ScalingType.BlockWise1x32, 32), torch.float8_e4m3fn: (ScalingType.BlockWise1x16, 16)}

ROUNDING = 1e-6
"""Of tensors' scales in float32, which a kernel applies on its own terms: 2**-24 each."""


def build(name: str, rows: int, width: int, *, seed: int) -> Quantized:
    """Integers, whose sums are exact, beside outliers that make scales of blocks differ."""
    x = torch.randint(-6, 7, (rows, width), generator=torch.Generator().manual_seed(seed)).float()
    x[::5] *= 64.0
    return quantize_alone(x, OPERANDS[name], power_of_two=True)


def multiply_as_documented(
    a: Tensor,
    b: Tensor,
    scales_a: list[Tensor],
    recipes_a: list[ScalingType],
    scales_b: list[Tensor],
    recipes_b: list[ScalingType],
    *,
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    output_dtype: torch.dtype,
) -> Tensor:
    """`torch.nn.functional.scaled_mm` of a GPU: its conditions, and its product in float32."""
    assert a.stride(1) == 1
    assert b.stride(0) == 1, "what is contracted comes last in both"
    assert a.shape[1] % 16 == 0
    assert b.shape[1] % 16 == 0
    left = read_as_documented(a, scales_a, recipes_a, swizzle_a)
    right = read_as_documented(b.T, scales_b, recipes_b, swizzle_b)
    return (left @ right.T).to(output_dtype)


def read_as_documented(
    codes: Tensor, scales: list[Tensor], recipes: list[ScalingType], swizzles: list[SwizzleType]
) -> Tensor:
    assert len(scales) == len(recipes) == len(swizzles)
    if codes.dtype == torch.float4_e2m1fn_x2:
        numbers = decode(unpack(codes.view(torch.uint8)), "e2m1")
    else:
        numbers = codes.float()
    for scale, recipe, swizzled in zip(scales, recipes, swizzles, strict=True):
        if recipe == ScalingType.TensorWise:
            assert (scale.dtype, scale.numel(), swizzled) == (torch.float32, 1, SwizzleType.NO_SWIZZLE)
            numbers = numbers * scale
        else:
            expected, block = SCALES[scale.dtype]
            assert (recipe, swizzled) == (expected, SwizzleType.SWIZZLE_32_4_4)
            numbers = numbers * unswizzle(scale, numbers.shape[0], numbers.shape[1] // block).repeat_interleave(
                block, 1
            )
    return numbers


def unswizzle(scales: Tensor, rows: int, width: int) -> Tensor:
    """By the formula of the documentation for the offset of one scale."""
    tiles_across = -(-width // 4)
    r, c = torch.arange(rows).unsqueeze(1), torch.arange(width)
    tile = (r // 128) * tiles_across + c // 4
    offset = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    assert scales.numel() == -(-rows // 128) * tiles_across * 512
    codes = scales.view(torch.uint8)[offset]
    return decode_e8m0(codes) if scales.dtype == torch.float8_e8m0fnu else decode(codes, "e4m3")


def list_gemms(x: Quantized, w: Quantized, dy: Quantized, kernel: Kernel) -> dict[str, tuple[Factor, Factor]]:
    def at(quantized: Quantized, orientation: Orientation) -> Factor:
        return prepare(quantized, orientation, torch.float32, kernel=kernel)

    return {
        "forward": (at(x, "rows"), at(w, "rows").T),
        "dgrad": (at(dy, "rows"), at(w, "columns")),
        "wgrad": (at(dy, "columns").T, at(x, "columns")),
        "wgrad of some tokens": (
            at(dy, "columns").narrow(Interval(32, 64)).T,
            at(x, "columns").narrow(Interval(32, 64)),
        ),
    }


CASES = {
    # x [T, K], w [N, K], dy [T, N]: sizes that fill no tiles and, where the format allows, no sixteens.
    "fp8": ("e4m3 current", "e4m3 current", "e5m2 delayed", (70, 40, 24)),
    "fp8, whole sixteens": ("e4m3 current", "e4m3 current", "e5m2 delayed", (64, 48, 32)),
    "mxfp8": ("e4m3 block32", "e4m3 block32", "e4m3 block32", (160, 96, 64)),
    "nvfp4": ("e2m1 block16", "e2m1 block16", "e2m1 block16", (144, 80, 48)),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad", "wgrad of some tokens"])
@pytest.mark.parametrize("adds", [False, True])
def test_kernels_are_given_what_the_emulation_multiplies(
    case: str, gemm: str, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "scaled_mm", multiply_as_documented)
    check(case, gemm, adds)


@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad", "wgrad of some tokens"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("case", ["fp8", "fp8, whole sixteens"])
def test_torch_multiplies_codes_on_a_cpu_too(case: str, gemm: str, adds: bool) -> None:
    check(case, gemm, adds)


def check(case: str, gemm: str, adds: bool) -> None:
    x_name, w_name, dy_name, (tokens, k, n) = CASES[case]
    x, w = build(x_name, tokens, k, seed=0), build(w_name, n, k, seed=1)
    dy = build(dy_name, tokens, n, seed=2)
    out, expected = (_run(list_gemms(x, w, dy, kernel)[gemm], adds) for kernel in ("native", "emulation"))
    torch.testing.assert_close(out, expected, rtol=ROUNDING, atol=ROUNDING * expected.abs().max().item())


def _run(factors: tuple[Factor, Factor], adds: bool) -> Tensor:
    a, b = factors
    rows, columns = _count(a, 0), _count(b, 1)
    addend = torch.linspace(-1, 1, columns) if adds else None
    out = torch.full((rows, columns), torch.nan)
    multiply(a, b, addend, out=out)
    return out


def _count(factor: Factor, dim: int) -> int:
    return (factor.codes if isinstance(factor, native.Codes) else factor.numbers).shape[dim]


def test_what_is_added_to_a_product_is_rounded_with_it() -> None:
    x, w = (build("e4m3 current", 64, 64, seed=seed) for seed in (0, 1))
    factors = prepare(x, "rows", torch.float32, kernel="native"), prepare(w, "rows", torch.float32, kernel="native").T
    addend = torch.linspace(-1000, 1000, 64)
    exact, out = torch.empty(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    multiply(*factors, addend, out=exact)
    multiply(*factors, addend, out=out)
    assert torch.equal(out, exact.to(torch.bfloat16))


def test_scales_lie_by_the_formula_of_the_documentation() -> None:
    scales = torch.randint(0, 127, (300, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    swizzled = swizzle(scales).view(torch.float8_e8m0fnu)
    assert torch.equal(unswizzle(swizzled, 300, 7), decode_e8m0(scales))


def test_a_cpu_has_no_capability() -> None:
    assert find_capability(torch.device("cpu")) is None
