"""The mesh is a bijection of ranks and coordinates, and each axis cuts the world into groups."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ShardingError
from plait.planner.plan_config import ORDER
from plait.sharding import AXES, COMBINED, Coordinates, MeshShape, list_parts

EVERY = (*AXES, *COMBINED)
DEGREES = st.integers(1, 3)
SHAPES = st.builds(MeshShape, pp=DEGREES, dp_replicate=DEGREES, dp_shard=DEGREES, cp=DEGREES, tp=st.integers(1, 5))


@given(SHAPES)
def test_every_rank_has_its_own_coordinates_and_tp_varies_fastest(shape: MeshShape) -> None:
    coordinates = [shape.coordinates(rank) for rank in range(shape.world_size)]
    assert coordinates == [Coordinates(*each) for each in product(*map(range, shape.degrees))]
    assert [shape.rank(each) for each in coordinates] == list(range(shape.world_size))


def test_the_planner_has_the_same_order_of_axes() -> None:
    assert tuple(reversed(ORDER)) == AXES


@given(SHAPES, st.sampled_from(EVERY))
def test_the_groups_of_an_axis_partition_the_world(shape: MeshShape, axis: str) -> None:
    groups = shape.list_groups(axis)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(shape.world_size))
    assert {len(ranks) for ranks in groups} == {shape.degree(axis)}
    assert all(list(ranks) == sorted(ranks) for ranks in groups)


@given(SHAPES, st.sampled_from(EVERY))
def test_ranks_of_a_group_differ_in_its_axis_alone(shape: MeshShape, axis: str) -> None:
    for ranks in shape.list_groups(axis):
        places = [shape.coordinates(rank) for rank in ranks]
        for other in AXES:
            seen = {getattr(place, other) for place in places}
            assert len(seen) == (shape.degree(other) if other in list_parts(axis) else 1)


@given(SHAPES)
def test_combined_axes_are_products(shape: MeshShape) -> None:
    assert shape.dp == shape.dp_replicate * shape.dp_shard
    assert shape.degree("dp_cp") == shape.dp * shape.cp
    assert shape.degree("dp_cp") == shape.dp_replicate * shape.degree("dp_shard_cp")
    assert shape.world_size == shape.pp * shape.degree("dp_cp") * shape.tp


def test_sums_over_dp_and_cp_are_called_dp_where_sequences_are_whole() -> None:
    assert MeshShape(dp_replicate=2, dp_shard=2).sums == "dp"
    assert MeshShape(dp_replicate=2, cp=2).sums == "dp_cp"
    assert MeshShape(dp_shard=2).name("dp_shard_cp") == "dp_shard"


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(ShardingError, match=f"rank {rank} is not on the mesh dp_replicate=2 tp=3"):
        MeshShape(dp_replicate=2, tp=3).coordinates(rank)


def test_coordinates_outside_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"pp=0 dp_replicate=0 dp_shard=0 cp=2 tp=0 is not on the mesh cp=2 tp=3"):
        MeshShape(cp=2, tp=3).rank(Coordinates(cp=2))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("degree", [0, -1])
def test_a_degree_that_is_none_is_refused(axis: str, degree: int) -> None:
    with pytest.raises(ShardingError, match=f"a mesh of .*{axis}={degree}.* is not one"):
        MeshShape(**{axis: degree})


def test_more_ranks_than_may_share_a_layer_are_refused() -> None:
    with pytest.raises(ShardingError, match="a mesh of tp=1025 is not one: .* tp at most 1024"):
        MeshShape(tp=1025)


def test_an_axis_that_is_none_is_refused() -> None:
    with pytest.raises(ShardingError, match="a mesh has no axis 'ep'\n\nhint: it has pp, dp_replicate, .*dp_shard_cp"):
        MeshShape().list_groups("ep")


def test_coordinates_print_as_in_error_messages() -> None:
    shape = MeshShape(dp_replicate=2, tp=4)
    assert shape.describe(shape.coordinates(5)) == "dp_replicate=1 tp=1"
    assert MeshShape(tp=4).describe(Coordinates(tp=3)) == "tp=3"
    assert str(MeshShape(pp=2, cp=2)) == "pp=2 cp=2 tp=1"
