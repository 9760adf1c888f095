"""The first difference between a trace and its contract, and how it reads."""

from dataclasses import replace

import pytest

from plait.contract.collective import Collective
from plait.sharding import Kind
from plait.verify.static.trace import find_difference

GATHER = Collective(Kind.ALL_GATHER, "tp", 2, (14, 64), "float32")
SCATTER = Collective(Kind.REDUCE_SCATTER, "tp", 2, (14, 64), "float32")
NORM = Collective(Kind.ALL_REDUCE, "tp", 2, (1,), "float32")
PROMISED = [GATHER, SCATTER, GATHER, SCATTER, NORM]


def test_equal_lists_have_no_difference():
    assert find_difference(PROMISED, list(PROMISED)) is None


@pytest.mark.parametrize("dropped", range(len(PROMISED)))
def test_every_dropped_collective_is_found(dropped):
    """FIELD 3.19: a collective that is not issued where it was promised fails, wherever it is."""
    issued = PROMISED[:dropped] + PROMISED[dropped + 1 :]
    assert find_difference(PROMISED, issued).index == dropped


@pytest.mark.parametrize("doubled", range(len(PROMISED)))
def test_every_doubled_collective_is_found(doubled):
    issued = PROMISED[: doubled + 1] + PROMISED[doubled:]
    assert find_difference(PROMISED, issued).index == doubled + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", Kind.ALL_REDUCE),
        ("axis", "dp"),
        ("degree", 4),
        ("shape", (13, 64)),
        ("dtype", "bfloat16"),
        ("dim", 1),
        ("op", "max"),
    ],
)
def test_every_field_is_compared_and_named(field, value):
    """FIELD 3.18: among others, a reduction carried in another dtype than promised."""
    issued = [*PROMISED[:3], replace(SCATTER, **{field: value}), NORM]
    difference = find_difference(PROMISED, issued)
    assert (difference.index, difference.fields) == (3, (field,))


def test_swapped_order_is_found():
    assert find_difference(PROMISED, [SCATTER, GATHER, *PROMISED[2:]]).index == 0


def test_report_shows_what_both_agreed_on_and_both_sides():
    difference = find_difference(PROMISED, [*PROMISED[:3], replace(SCATTER, dtype="bfloat16"), NORM])
    assert str(difference) == (
        "collective 3 differs in dtype (5 promised, 5 issued)\n"
        "     1  both      reduce_scatter [14x64] float32 over tp\n"
        "     2  both      all_gather [14x64] float32 over tp\n"
        "     3  promised  reduce_scatter [14x64] float32 over tp\n"
        "     3  issued    reduce_scatter [14x64] bfloat16 over tp"
    )


def test_report_of_a_missing_and_of_an_extra_collective():
    assert "collective 4 is missing (5 promised, 4 issued)" in str(find_difference(PROMISED, PROMISED[:4]))
    assert "issued    (nothing)" in str(find_difference(PROMISED, PROMISED[:4]))
    assert "collective 5 is extra (5 promised, 6 issued)" in str(find_difference(PROMISED, [*PROMISED, NORM]))
