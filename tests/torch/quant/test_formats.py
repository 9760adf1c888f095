"""Number formats against ml_dtypes: every bfloat16 value, ties and what is around them, and random float32 bits."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from plait.quant.formats import (
    LARGEST,
    decode,
    decode_e8m0,
    decode_packed,
    encode,
    encode_e8m0,
    invert_e8m0,
    pack,
    unpack,
)

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
NUM_CODES = {"e4m3": 256, "e5m2": 256, "e2m1": 16}
FORMATS = pytest.mark.parametrize("fmt", list(DTYPES))
NOISE_STEPS = 64
"""Of noise on a grid: places between neighbours that are multiples of 1/64 have exact shares of it."""


def list_bfloat16() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def list_random_bits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=generator).to(torch.int32).view(torch.float32)


def list_random_values(fmt: str) -> Tensor:
    """Of magnitudes that the format has, from its least number to beyond its largest."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-20, 18, (1 << 18,), generator=generator)
    return torch.randn(1 << 18, generator=generator).ldexp(exponents if fmt != "e2m1" else exponents.clamp(-4, 3))


def list_numbers(fmt: str) -> Tensor:
    """The finite ones that are not negative, in order."""
    numbers = list_codes(fmt).view(DTYPES[fmt]).astype(np.float32)
    return torch.from_numpy(np.unique(numbers[np.isfinite(numbers) & (numbers >= 0)]))


def list_codes(fmt: str) -> np.ndarray:
    return np.arange(NUM_CODES[fmt], dtype=np.uint8)


def list_ties(fmt: str) -> Tensor:
    """The middles between neighbours, and the float32 numbers on both sides of them."""
    numbers = list_numbers(fmt)
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    near = torch.cat((middles, middles.nextafter(up), middles.nextafter(down), numbers))
    return torch.cat((near, -near))


def encode_by_ml_dtypes(x: Tensor, fmt: str) -> np.ndarray:
    """Which makes what is too large NaN or infinite, and has no saturation of its own."""
    return np.clip(x.numpy(), -LARGEST[fmt], LARGEST[fmt]).astype(DTYPES[fmt]).view(np.uint8)


SOURCES = {
    "every bfloat16": lambda fmt: list_bfloat16(),
    "random bits": lambda fmt: list_random_bits(),
    "random values": list_random_values,
    "ties": list_ties,
}


@FORMATS
@pytest.mark.parametrize("source", list(SOURCES))
def test_codes_are_those_of_ml_dtypes(fmt: str, source: str) -> None:
    x = SOURCES[source](fmt)
    x = x[~x.isnan()]
    assert len(x) >= NUM_CODES[fmt]
    np.testing.assert_array_equal(encode(x, fmt).numpy(), encode_by_ml_dtypes(x, fmt))


@FORMATS
def test_every_code_is_reached_by_its_own_number(fmt: str) -> None:
    numbers = list_codes(fmt).view(DTYPES[fmt]).astype(np.float32)
    finite = np.isfinite(numbers)
    np.testing.assert_array_equal(encode(torch.from_numpy(numbers[finite]), fmt).numpy(), list_codes(fmt)[finite])


@FORMATS
def test_numbers_are_those_of_ml_dtypes(fmt: str) -> None:
    expected = list_codes(fmt).view(DTYPES[fmt]).astype(np.float32)
    numbers = decode(torch.from_numpy(list_codes(fmt)), fmt).numpy()
    np.testing.assert_array_equal(numbers, expected)
    np.testing.assert_array_equal(np.signbit(numbers[expected == 0]), np.signbit(expected[expected == 0]))


@FORMATS
def test_what_is_too_large_saturates(fmt: str) -> None:
    largest = LARGEST[fmt]
    x = torch.tensor([largest, largest * 1.0625, largest * 1.5, 1e30, torch.inf])
    assert decode(encode(x, fmt), fmt).tolist() == [largest] * 5
    assert decode(encode(-x, fmt), fmt).tolist() == [-largest] * 5


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_nan_stays_nan(fmt: str) -> None:
    nans = list_bfloat16()
    nans = nans[nans.isnan()]
    assert decode(encode(nans, fmt), fmt).isnan().all()
    assert decode(encode(nans, fmt, torch.zeros_like(nans)), fmt).isnan().all()


def test_e2m1_has_no_nan_and_takes_its_largest_number() -> None:
    assert decode(encode(torch.tensor([torch.nan]), "e2m1"), "e2m1").abs().tolist() == [6.0]


@FORMATS
def test_zeros_keep_their_sign(fmt: str) -> None:
    tiny = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    zeros = decode(encode(tiny, fmt), fmt)
    assert zeros.tolist() == [0.0] * 4
    assert zeros.signbit().tolist() == [False, True, False, True]


@FORMATS
def test_stochastic_rounding_goes_up_as_often_as_a_value_is_near_the_upper_neighbour(fmt: str) -> None:
    numbers = list_numbers(fmt)
    below, above = numbers[:-1], numbers[1:]
    noise = torch.arange(NOISE_STEPS) / NOISE_STEPS
    for place in range(NOISE_STEPS):
        x = below + (above - below) * (place / NOISE_STEPS)
        rounded = decode(encode(*_pair(x, noise, fmt)), fmt)
        assert ((rounded == above) | (rounded == below)).all()
        assert ((rounded == above).sum(0) == place).all()
        # So the mean over all noise is the value, exactly.
        torch.testing.assert_close(rounded.double().mean(0), x.double(), rtol=0, atol=0)
        assert torch.equal(decode(encode(*_pair(-x, noise, fmt)), fmt), -rounded)


def _pair(x: Tensor, noise: Tensor, fmt: str) -> tuple[Tensor, str, Tensor]:
    """Every value with every noise: `[noise, x]`."""
    shape = (len(noise), len(x))
    return x.expand(shape).contiguous(), fmt, noise.unsqueeze(1).expand(shape)


@FORMATS
def test_stochastic_rounding_leaves_numbers_of_the_format(fmt: str) -> None:
    codes = torch.from_numpy(list_codes(fmt))
    numbers = decode(codes, fmt)
    finite = numbers.isfinite()
    for noise in (0.0, 0.5, 1 - 2**-24):
        rounded = encode(numbers[finite], fmt, torch.full_like(numbers[finite], noise))
        assert torch.equal(rounded, codes[finite])


@FORMATS
def test_stochastic_rounding_saturates(fmt: str) -> None:
    x = torch.tensor([LARGEST[fmt] * 1.01, torch.inf, -torch.inf])
    assert decode(encode(x, fmt, torch.zeros(3)), fmt).tolist() == [LARGEST[fmt], LARGEST[fmt], -LARGEST[fmt]]


def test_two_codes_lie_in_a_byte_the_first_below() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0x21, 0x0F]]


def test_packing_loses_nothing() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    assert torch.equal(pack(unpack(packed)), packed)
    assert torch.equal(decode_packed(packed), decode(unpack(packed), "e2m1"))


def test_codes_that_do_not_lie_one_after_the_other_are_decoded_too() -> None:
    payload = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for fmt in ("e4m3", "e5m2"):
        expected = decode(payload[:, 3:9].contiguous(), fmt)
        torch.testing.assert_close(decode(payload[:, 3:9], fmt), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(decode_packed(payload[:, 3:9]), decode_packed(payload[:, 3:9].contiguous()))


def test_powers_of_two_are_those_of_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decode_e8m0(torch.from_numpy(codes)).numpy(), expected)
    back = encode_e8m0(torch.from_numpy(expected[:-1].copy()))
    np.testing.assert_array_equal(back.numpy(), codes[:-1])


def test_scales_are_rounded_up_to_powers_of_two() -> None:
    powers = decode_e8m0(torch.arange(254, dtype=torch.uint8))
    above = powers.nextafter(torch.tensor(torch.inf))
    below = powers.nextafter(torch.tensor(0.0))
    assert torch.equal(encode_e8m0(above), torch.arange(1, 255, dtype=torch.uint8))
    assert torch.equal(encode_e8m0(below), torch.arange(254, dtype=torch.uint8))
    assert encode_e8m0(torch.tensor([0.0, 1e-45])).tolist() == [0, 0]


def test_a_scale_of_what_is_not_finite_is_nan() -> None:
    codes = encode_e8m0(torch.tensor([torch.inf, torch.nan]))
    assert codes.tolist() == [255, 255]
    assert decode_e8m0(codes).isnan().all()
    assert invert_e8m0(codes).tolist() == [0.0, 0.0]


def test_inverse_scales_are_exact() -> None:
    codes = torch.arange(254, dtype=torch.uint8)
    assert (invert_e8m0(codes).double() * decode_e8m0(codes).double() == 1).all()
