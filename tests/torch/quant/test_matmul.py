"""Products of quantized matrices: those of the exact numbers, of all rows or of some, with what is added to them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.contract.quantization import Orientation
from plait.quant.cast import Quantized
from plait.quant.matmul import Factor, find_accumulator, multiply, prepare
from plait.sharding import Interval
from tests.support.quantized_matrices import BOTH, OPERANDS, quantize_alone

EACH = pytest.mark.parametrize("name", ["e4m3 current", "e4m3 block32", "e2m1 block16"])
T, K, N = 96, 64, 32

FLOAT64_ROUNDING = 1e-13
"""Of sums of a hundred products in float64, in two orders and with scales before or behind."""

FLOAT32_ROUNDING = 1e-5
"""The same in float32, 2**-24 a step."""


def build(name: str, *shape: int, seed: int = 0) -> Quantized:
    return quantize_alone(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), OPERANDS[name])


def list_products(name: str, dtype: torch.dtype, **options: Any) -> dict[str, tuple[Factor, Factor, Tensor]]:
    """Factors of the three GEMMs of a linear, and what their product is in float64."""
    x, w, dy = build(name, T, K), build(name, N, K, seed=1), build(name, T, N, seed=2)

    def at(quantized: Quantized, orientation: Orientation) -> tuple[Factor, Tensor]:
        factor = prepare(quantized, orientation, dtype, **options)
        return factor, quantized.dequantize(orientation, torch.float64)

    x_rows, w_rows, dy_rows = (at(tensor, "rows") for tensor in (x, w, dy))
    x_columns, w_columns, dy_columns = (at(tensor, "columns") for tensor in (x, w, dy))
    return {
        "forward": (x_rows[0], w_rows[0].T, x_rows[1] @ w_rows[1].T),
        "dgrad": (dy_rows[0], w_columns[0], dy_rows[1] @ w_columns[1]),
        "wgrad": (dy_columns[0].T, x_columns[0], dy_columns[1].T @ x_columns[1]),
    }


@EACH
@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, FLOAT64_ROUNDING), (torch.float32, FLOAT32_ROUNDING)])
def test_products_are_those_of_the_exact_numbers(name: str, gemm: str, dtype: torch.dtype, rounding: float) -> None:
    a, b, expected = list_products(name, dtype)[gemm]
    out = torch.full(expected.shape, torch.nan, dtype=dtype)
    multiply(a, b, None, out=out)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=rounding * expected.abs().max().item())


@EACH
def test_a_bias_is_added_behind_the_scales(name: str) -> None:
    a, b, expected = list_products(name, torch.float64)["forward"]
    bias, out = torch.randn(N, dtype=torch.float64), torch.empty(T, N, dtype=torch.float64)
    multiply(a, b, bias, out=out)
    torch.testing.assert_close(out, expected + bias, rtol=0, atol=FLOAT64_ROUNDING * expected.abs().max().item())


@EACH
def test_another_dtype_is_rounded_to_once(name: str) -> None:
    a, b, _ = list_products(name, torch.float32)["forward"]
    bias = torch.randn(N).to(torch.bfloat16)
    exact, out = torch.empty(T, N), torch.empty(T, N, dtype=torch.bfloat16)
    multiply(a, b, bias, out=exact)
    multiply(a, b, bias, out=out)
    assert torch.equal(out, exact.to(torch.bfloat16))


@EACH
def test_products_of_chunks_of_tokens_add_up_where_they_are_wanted(name: str) -> None:
    dy, x, expected = list_products(name, torch.float64)["wgrad"]
    out = torch.full(expected.shape, torch.nan, dtype=torch.float64)
    for index, rows in enumerate((Interval(0, 32), Interval(32, 32), Interval(32, 96))):
        multiply(dy.T.narrow(rows).T, x.narrow(rows), out if index else None, out=out)
    torch.testing.assert_close(out, expected, rtol=0, atol=FLOAT64_ROUNDING * expected.abs().max().item())


@EACH
def test_rows_of_a_product_are_products_of_rows(name: str) -> None:
    a, b, expected = list_products(name, torch.float64)["forward"]
    out = torch.full(expected.shape, torch.nan, dtype=torch.float64)
    for rows in (Interval(0, 1), Interval(1, 64), Interval(64, 96)):
        multiply(a.narrow(rows), b, None, out=out[rows.start : rows.stop])
    torch.testing.assert_close(out, expected, rtol=0, atol=FLOAT64_ROUNDING * expected.abs().max().item())


def test_no_scale_is_applied_where_there_is_none() -> None:
    factor = prepare(build("e4m3 block32", 32, 64), "rows", torch.float32)
    assert factor.scale is None
    out = torch.empty(32, 32)
    multiply(factor, factor.T, None, out=out)
    assert (out.diagonal() > 0).all()


def test_one_scale_is_enough() -> None:
    a, b, expected = list_products("e4m3 current", torch.float64)["forward"]
    out = torch.empty(T, N, dtype=torch.float64)
    multiply(replace(a, scale=None), b, None, out=out)
    assert a.scale is not None
    torch.testing.assert_close(out * a.scale, expected)


@EACH
@pytest.mark.parametrize("kernel", ["emulation", "native"])
def test_a_factor_of_rows_is_that_of_the_narrowed_matrix(name: str, kernel: Any) -> None:
    quantized, rows = build(name, T, K), Interval(32, 64)
    for orientation in BOTH:
        narrowed = prepare(quantized, orientation, torch.float32, kernel=kernel).narrow(rows)
        expected = prepare(quantized.narrow(rows), orientation, torch.float32, kernel=kernel)
        for ours, theirs in zip(vars(narrowed).values(), vars(expected).values(), strict=True):
            assert ours is theirs or torch.equal(ours, theirs)


@EACH
def test_no_tokens_have_a_product_of_zeros(name: str) -> None:
    none, w = build(name, 0, K), build(name, N, K)
    out = torch.full((K, K), torch.nan)
    factor = prepare(none, "columns", torch.float32)
    multiply(factor.T, factor, None, out=out)
    assert not out.any()
    multiply(prepare(none, "rows", torch.float32), prepare(w, "rows", torch.float32).T, None, out=torch.empty(0, N))


def test_float64_is_summed_in_float64_and_all_else_in_float32() -> None:
    assert find_accumulator(torch.float64) == torch.float64
    assert {find_accumulator(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)} == {torch.float32}


def test_factors_of_two_kernels_do_not_meet() -> None:
    quantized = build("e4m3 current", 32, 32)
    emulated = prepare(quantized, "rows", torch.float32)
    native = prepare(quantized, "rows", torch.float32, kernel="native")
    for a, b in ((native, emulated), (emulated, native)):
        with pytest.raises(AssertionError, match=f"{type(a).__name__} times {type(b).__name__}"):
            multiply(a, b.T, None, out=torch.empty(32, 32))
