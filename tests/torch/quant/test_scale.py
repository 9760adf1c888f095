"""Scales of tensors and of blocks: from magnitudes, zeros, and what is not finite."""

import pytest
import torch
from torch import Tensor

from plait.config.recipe import Operand
from plait.quant.formats import LARGEST, decode, decode_e8m0
from plait.quant.hadamard import mix
from plait.quant.scale import derive_scale, find_multiplier, measure_amax, measure_blocks, scale_blocks

CURRENT = Operand("e4m3", "current")
BLOCK16 = Operand("e2m1", "block16")
BLOCK32 = Operand("e4m3", "block32")
SIGNS = torch.tensor([1.0, -1.0] * 5 + [1.0] * 6)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_magnitude_is_measured(dtype: torch.dtype) -> None:
    x = draw(32, 48).to(dtype)
    x[5, 7] = -17.0
    amax = measure_amax(x, CURRENT, ("rows",))
    assert amax.tolist() == [17.0]
    assert amax.dtype == torch.float32


def test_float64_is_measured_as_the_float32_that_is_quantized() -> None:
    x = torch.tensor([[1.0 + 2.0**-40]], dtype=torch.float64)
    assert measure_amax(x, CURRENT, ("rows",)).tolist() == [1.0]


def test_columns_are_measured_as_they_are_mixed() -> None:
    x = draw(32, 48)
    amax = measure_amax(x, BLOCK16, ("rows", "columns"), signs=SIGNS)
    assert torch.equal(amax, torch.stack((x.abs().max(), mix(x, SIGNS).abs().max())))
    assert amax[0] != amax[1]
    assert torch.equal(measure_amax(x, BLOCK16, ("columns",), signs=SIGNS), amax[1:])
    assert torch.equal(measure_amax(x, BLOCK16, ("rows", "columns")), amax[:1].expand(2))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_measured_as_infinity(wrong: float) -> None:
    x = draw(32, 48)
    x[3, 4] = wrong
    # A maximum over ranks may drop a NaN, and never an infinity.
    assert measure_amax(x, CURRENT, ("rows",)).tolist() == [torch.inf]
    assert measure_amax(x, BLOCK16, ("rows", "columns"), signs=SIGNS).tolist() == [torch.inf] * 2


def test_nothing_is_measured_as_zero() -> None:
    assert measure_amax(torch.empty(0, 48), BLOCK16, ("rows", "columns"), signs=SIGNS).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("operand", [CURRENT, Operand("e5m2", "delayed"), BLOCK16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_have_scale_one(operand: Operand, power_of_two: bool) -> None:
    scale = derive_scale(torch.zeros(2), operand, power_of_two=power_of_two)
    assert scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("operand", [CURRENT, Operand("e5m2", "current"), BLOCK16])
def test_the_largest_number_stands_for_the_largest_magnitude(operand: Operand) -> None:
    largest = LARGEST[operand.format] * (LARGEST["e4m3"] if operand.block else 1)
    assert derive_scale(torch.tensor(2 * largest), operand).item() == 2.0
    assert derive_scale(torch.tensor(2 * largest), operand, margin=3).item() == 16.0


@pytest.mark.parametrize("operand", [CURRENT, BLOCK16])
def test_scales_by_powers_of_two_never_overflow(operand: Operand) -> None:
    amaxes = draw(1000).exp()
    exact, rounded = derive_scale(amaxes, operand), derive_scale(amaxes, operand, power_of_two=True)
    assert (rounded.frexp().mantissa == 0.5).all()
    assert (rounded >= exact).all()
    assert (rounded < 2 * exact).all()


def test_a_scale_gives_back_what_numbers_are_multiplied_by() -> None:
    amaxes = draw(1 << 14).exp()
    expected = torch.full_like(amaxes, 448.0) / amaxes
    # The reciprocal of a float32 is not enough to know it again: here in one case of seven.
    assert not torch.equal(expected.reciprocal().reciprocal(), expected)
    assert torch.equal(find_multiplier(derive_scale(amaxes, CURRENT)), expected)


@pytest.mark.parametrize("operand", [CURRENT, Operand("e5m2", "current"), BLOCK16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_of_the_least_magnitudes_are_finite(operand: Operand, power_of_two: bool) -> None:
    scale = derive_scale(torch.tensor([1e-45, 1e-40, 3e38]), operand, power_of_two=power_of_two)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert find_multiplier(scale).isfinite().all()


@pytest.mark.parametrize("operand", [CURRENT, BLOCK16])
def test_an_infinite_magnitude_has_an_infinite_scale(operand: Operand) -> None:
    assert derive_scale(torch.tensor(torch.inf), operand).item() == torch.inf


def test_magnitudes_of_blocks() -> None:
    x = draw(4, 6, 8)
    x[1, 2, 3], x[2, 0, 0], x[3, 0, 0] = torch.nan, -torch.inf, -0.0
    for dim in (1, 2):
        expected = x.abs().amax(dim)
        torch.testing.assert_close(measure_blocks(x, dim), expected, rtol=0, atol=0, equal_nan=True)


def test_a_power_of_two_is_the_least_under_which_no_number_saturates() -> None:
    amaxes = draw(1 << 14).mul(12).exp()
    codes, multipliers = scale_blocks(amaxes, BLOCK32, None)
    scales = decode_e8m0(codes)
    assert (amaxes * multipliers <= 448).all()
    assert (amaxes * multipliers * 2 > 448).all()
    assert (scales * multipliers == 1).all()


def test_blocks_of_16_are_scaled_relative_to_their_tensor() -> None:
    scale = derive_scale(torch.tensor(448.0), BLOCK16)
    codes, multipliers = scale_blocks(torch.tensor([448.0, 7.0, 0.0]), BLOCK16, scale)
    # The largest block has the largest e4m3 number, and zeros the least that has all its mantissa.
    assert decode(codes, "e4m3").tolist() == [448.0, 7.0, 2.0**-6]
    assert (multipliers * decode(codes, "e4m3") * scale.float()).tolist() == pytest.approx([1.0] * 3, rel=2**-22)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_scales_of_blocks_that_are_not_finite_are_nan(wrong: float) -> None:
    codes, _ = scale_blocks(torch.tensor([wrong]), BLOCK32, None)
    assert codes.tolist() == [255]
    codes, _ = scale_blocks(torch.tensor([torch.nan]), BLOCK16, torch.tensor(1.0, dtype=torch.float64))
    assert decode(codes, "e4m3").isnan().all()


def test_a_tensor_whose_blocks_have_all_scales_has_no_amax() -> None:
    with pytest.raises(AssertionError, match="e4m3 block32: blocks have their own scales, and the tensor none"):
        measure_amax(draw(32, 32), BLOCK32, ("rows",))
