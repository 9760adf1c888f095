import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import ShardingError
from plait.sharding import Coordinates, MeshShape


@given(dp=st.integers(1, 6), tp=st.integers(1, 8))
def test_every_rank_has_its_own_coordinates_and_tp_varies_fastest(dp: int, tp: int) -> None:
    mesh = MeshShape(dp, tp)
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert coordinates == [Coordinates(d, t) for d in range(dp) for t in range(tp)]


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(ShardingError, match=f"rank {rank} is not on the mesh dp=2 tp=3"):
        MeshShape(dp=2, tp=3).coordinates(rank)


@pytest.mark.parametrize(("dp", "tp"), [(0, 1), (1, 0), (-1, -1), (1, 1025)])
def test_a_degree_that_is_none_is_refused(dp: int, tp: int) -> None:
    with pytest.raises(ShardingError, match=f"a mesh of dp={dp} tp={tp} is not one"):
        MeshShape(dp, tp)


def test_coordinates_print_as_in_error_messages() -> None:
    assert str(MeshShape(dp=2, tp=4).coordinates(5)) == "dp=1 tp=1"
