"""Attention over shards of a sequence is the attention of one device: every method, order, mask and kind of heads."""

import pytest

from tests.support.context_attention import HEADS, MASKS, SIZE, Case, build_axis, find_error, list_contexts

FLOAT64 = 1e-12


def run_masks(degree: int, heads: tuple[int, int], size: int) -> dict[str, float]:
    axis = build_axis(degree)
    errors = {}
    for name, mask in MASKS.items():
        case = Case(mask, *heads, size=size)
        expected = case.run_alone()
        for context in list_contexts(axis, size):
            where = f"{context.method}, {context.order.chunks}, {name}"
            errors[where] = find_error(case.run_sharded(context), expected)
    return errors


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_every_method_order_and_mask_equals_one_device_forward_and_backward(ranks, degree, heads):
    for errors in ranks(degree).call(run_masks, degree=degree, heads=HEADS[heads], size=SIZE):
        assert len(errors) == 6 * len(MASKS)
        assert {where: error for where, error in errors.items() if not error <= FLOAT64} == {}
