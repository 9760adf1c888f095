from math import prod

import pytest
from hypothesis import given

from plait.errors import ShardingError
from plait.sharding import Invariant, Layout, Partial, Placement, Replicate, Shard, Split, build_split
from tests.support.strategies import splits


@pytest.mark.parametrize(
    ("placement", "printed"),
    [
        (Invariant(), "[T, D]"),
        (Replicate(), "[T, D]"),
        (Partial(), "[T, D] partial(tp)"),
        (Shard(0), "[T/tp, D]"),
        (Shard(1), "[T, D/tp]"),
    ],
    ids=str,
)
def test_a_layout_prints_its_local_shape_as_a_division(placement: Placement, printed: str) -> None:
    shape = (7, 12)
    split = build_split(shape[placement.dim], 2) if isinstance(placement, Shard) else None
    assert str(Layout(("T", "D"), shape, placement, split)) == printed


@given(split=splits())
def test_local_elements_add_up_to_the_global_ones(split: Split) -> None:
    layout = Layout(("T", "D"), (split.size, 6), Shard(0), split)
    assert sum(layout.local_numel(rank) for rank in range(split.degree)) == split.size * 6
    assert all(layout.local_numel(rank) == prod(layout.local_shape(rank)) for rank in range(split.degree))


def test_seven_tokens_over_two_ranks_are_four_and_three() -> None:
    layout = Layout(("T", "D"), (7, 12), Shard(0), build_split(7, 2))
    assert [layout.local_shape(rank) for rank in range(2)] == [(4, 12), (3, 12)]


@pytest.mark.parametrize(
    ("dims", "placement", "split", "message"),
    [
        (("T",), Invariant(), None, "differ in length"),
        (("T", "D"), Shard(0), None, "its split is None"),
        (("T", "D"), Invariant(), build_split(7, 2), r"is Invariant but its split"),
        (("T", "D"), Shard(0), build_split(8, 2), "dim 0 is cut as"),
    ],
    ids=["dims", "no split", "split without a shard", "another size"],
)
def test_layouts_that_contradict_themselves_are_refused(
    dims: tuple[str, ...], placement: Placement, split: Split | None, message: str
) -> None:
    """FIELD 3.25: a split of 8 is not accepted for 7 tokens."""
    with pytest.raises(ShardingError, match=message):
        Layout(dims, (7, 12), placement, split)
