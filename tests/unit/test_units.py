import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.units import format_bytes, format_flops, format_seconds, format_si


@pytest.mark.parametrize(
    ("value_bytes", "printed"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (8192 * 4096 * 2, "67.1 MB"),
        (999_499, "999 kB"),
        (999_999, "1.00 MB"),
        (99_960, "100 kB"),
        (-2_500_000, "-2.50 MB"),
        (3.2e12, "3.20 TB"),
    ],
)
def test_bytes_have_decimal_prefixes_and_three_digits(value_bytes: float, printed: str) -> None:
    assert format_bytes(value_bytes) == printed


@given(st.integers(0, 10**21))
def test_the_number_printed_is_below_1000_and_within_half_a_digit(value: int) -> None:
    number, unit = format_si(value, "B").split(" ")
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, "EB": 1e18}[unit]
    assert float(number) < 1000 or unit == "EB"
    assert abs(float(number) * scale - value) <= 0.0051 * value


def test_a_unitless_count_has_no_trailing_space() -> None:
    assert format_si(12, "") == "12"
    assert format_si(0.5, "") == "0.5"


def test_flops_are_counted_not_rated() -> None:
    assert format_flops(2 * 8192 * 8192 * 32768) == "4.40 TFLOP"


@pytest.mark.parametrize(
    ("value_s", "printed"),
    [
        (185.2, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (1905 * 60 + 31, "31 h 46 min"),
        (47.9 * 3600, "2 d 00 h"),
        (76.2 * 3600, "3 d 04 h"),
        (119.7, "2 min 00 s"),
        (1.25, "1.25 s"),
        (0.31, "310 ms"),
        (0.9999, "1 s"),
        (12e-6, "12 us"),
        (0.9999e-3, "1 ms"),
        (5e-9, "5 ns"),
        (0.0, "0 ns"),
    ],
)
def test_seconds_have_the_prefix_that_reads_best(value_s: float, printed: str) -> None:
    assert format_seconds(value_s) == printed


@given(st.floats(0, 1e6))
def test_seconds_never_print_an_exponent(value_s: float) -> None:
    printed = format_seconds(value_s)
    assert re.fullmatch(r"(\d+ d \d\d h|\d+ h \d\d min|\d+ min \d\d s|[\d.]+ (s|ms|us)|[\d.e-]+ ns)", printed), printed
