"""The error budget grows with depth, with the length of sums and with the coarseness of the number format."""

import pytest

from plait.verify.static.budget import ErrorBudget, build_budget


def test_budget_grows_with_the_square_root_of_depth():
    shallow, deep = ErrorBudget("float32", 256, 9), ErrorBudget("float32", 256, 36)
    assert deep.value == pytest.approx(2 * shallow.value)


def test_budget_of_long_sums_grows_with_the_square_root_of_their_length():
    short, long = ErrorBudget("float32", 10_000, 9), ErrorBudget("float32", 40_000, 9)
    assert long.value == pytest.approx(2 * short.value, rel=0.01)


def test_budget_of_bfloat16_is_dominated_by_rounding_to_bfloat16():
    assert ErrorBudget("bfloat16", 256, 1).value == pytest.approx(4 * 2**-7, rel=0.01)


def test_budget_of_a_small_float32_model_is_far_below_any_real_mistake():
    assert 1e-6 < build_budget("float32", num_layers=2, longest_sum=256).value < 1e-4


def test_budget_prints_its_formula_and_every_number_in_it():
    assert str(build_budget("float32", num_layers=2, longest_sum=256)) == (
        "budget 4.9e-05 = 4 * sqrt(n) * (eps(float32) + sqrt(K) * eps(float32)): "
        "n = 36 GEMMs on the path, K = 256 terms in the longest sum"
    )


def test_a_float64_model_sums_in_float64():
    """Under a precision recipe both models compute in it: what is left is a thousandth of any quantized step."""
    budget = build_budget("float64", num_layers=2, longest_sum=256)
    assert 1e-14 < budget.value < 1e-12
    assert "sqrt(K) * eps(float64)" in str(budget)
