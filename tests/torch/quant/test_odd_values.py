"""Quantized matrices of zeros, of nothing, of what is not finite, too large or torn."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from plait.errors import ShardingError
from plait.quant.cast import quantize
from plait.quant.scale import derive_scale
from tests.support.quantized_matrices import BOTH, OPERANDS, find_scales, quantize_alone

SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0] * 4)
EACH = pytest.mark.parametrize("name", list(OPERANDS))
BLOCKED = pytest.mark.parametrize("name", [name for name in OPERANDS if "block" in name])


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


ZEROS: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(32, 64),
    "zeros below zero": lambda: -torch.zeros(32, 64),
    "nothing": lambda: torch.zeros(0, 64),
}


@EACH
@pytest.mark.parametrize("kind", list(ZEROS))
def test_zeros_stay_zeros(name: str, kind: str) -> None:
    x = ZEROS[kind]()
    quantized = quantize_alone(x, OPERANDS[name], signs=SIGNS)
    for orientation in BOTH:
        numbers = quantized.dequantize(orientation, torch.float32)
        assert numbers.shape == x.shape
        assert (numbers == 0).all()


@pytest.mark.parametrize(
    ("name", "wrong"),
    # An infinity in blocks of 16 has an infinite scale of the tensor, which callers refuse.
    [("e2m1 block16", torch.nan), *product([name for name in OPERANDS if "block32" in name], [torch.nan, torch.inf])],
)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(name: str, wrong: float) -> None:
    operand, x = OPERANDS[name], draw(64, 64)
    block = operand.block or 1
    scales = find_scales(x, operand, BOTH)
    clean = quantize(x, operand, BOTH, scales)
    x[33, 35] = wrong
    dirty = quantize(x, operand, BOTH, scales)
    for orientation in BOTH:
        is_nan = torch.zeros(64, 64, dtype=torch.bool)
        inside = slice(32, 32 + block)
        is_nan[(33, inside) if orientation == "rows" else (inside, 35)] = True
        numbers = dirty.dequantize(orientation, torch.float32)
        assert torch.equal(numbers.isnan(), is_nan)
        assert torch.equal(numbers[~is_nan], clean.dequantize(orientation, torch.float32)[~is_nan])


@EACH
def test_all_of_a_tensor_that_is_not_finite_is_nan_under_its_own_scale(name: str) -> None:
    quantized = quantize_alone(torch.full((32, 32), torch.nan), OPERANDS[name])
    for orientation in BOTH:
        assert quantized.dequantize(orientation, torch.float32).isnan().all()


def test_nan_is_kept_without_blocks() -> None:
    x = draw(4, 8)
    scales = find_scales(x, OPERANDS["e4m3 current"], ("rows",))
    x[1, 2] = torch.nan
    numbers = quantize(x, OPERANDS["e4m3 current"], ("rows",), scales).dequantize("rows", torch.float32)
    assert torch.equal(numbers.isnan(), x.isnan())


def test_what_is_larger_than_an_old_scale_allows_saturates() -> None:
    operand = OPERANDS["e5m2 delayed"]
    scale = derive_scale(torch.tensor(1.0), operand)
    numbers = quantize(torch.tensor([[5.0, -7.0, 1.0]]), operand, ("rows",), (scale,)).dequantize("rows", torch.float64)
    assert numbers.tolist() == [[1.0, -1.0, 1.0]]


@BLOCKED
def test_torn_blocks_are_refused(name: str) -> None:
    block = OPERANDS[name].block
    with pytest.raises(ShardingError, match=f"{OPERANDS[name]}: 40 features are no whole blocks of {block}"):
        quantize(torch.zeros(32, 40), OPERANDS[name], ("rows",), (None,))
    with pytest.raises(ShardingError, match=f"{OPERANDS[name]}: 40 tokens are no whole blocks of {block}") as error:
        quantize(torch.zeros(40, 32), OPERANDS[name], BOTH, (None, None))
    assert error.value.hint == f"make batch times sequence a multiple of {block}"
    assert len(quantize_alone(torch.zeros(40, 32), OPERANDS[name], ("rows",)).payload) == 40
