"""The axes of a mesh are the right ranks in the right order, with groups that are built once."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plait.comm import collectives, trace
from plait.comm.mesh import Mesh, build_mesh, build_mesh_from
from plait.errors import ConfigError, ShardingError
from plait.sharding import MeshShape
from tests.support.rank_pool import TIMEOUT_S


@dataclass(frozen=True)
class Seen:
    """What one rank sees of a mesh, and which global ranks an all-reduce of powers of two reached."""

    dp: tuple[int, ...]
    tp: tuple[int, ...]
    coordinates: tuple[int, int]
    reached: dict[str, tuple[int, ...]]
    who: str


def look_at(mesh: Mesh) -> Seen:
    reached = {}
    for axis in (mesh.dp, mesh.tp):
        bits = int(collectives.all_reduce(torch.tensor([2**mesh.rank]), axis))
        reached[axis.name] = tuple(rank for rank in range(mesh.shape.world_size) if bits >> rank & 1)
        assert axis.ranks[axis.rank] == mesh.rank
        assert axis.degree == len(axis.ranks)
    return Seen(mesh.dp.ranks, mesh.tp.ranks, tuple(mesh.coordinates), reached, trace.identity())


def look_at_shape(dp: int, tp: int) -> Seen:
    return look_at(build_mesh(MeshShape(dp_replicate=dp, tp=tp)))


def test_tp_is_on_neighbouring_ranks_and_dp_across_them(ranks):
    seen = ranks(4).call(look_at_shape, dp=2, tp=2)
    assert [rank.tp for rank in seen] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [rank.dp for rank in seen] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [rank.coordinates for rank in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(rank.reached == {"dp": rank.dp, "tp": rank.tp} for rank in seen)
    assert seen[3].who == "rank 3 (dp_replicate=1 tp=1)"


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (1, 4)])
def test_an_axis_may_be_the_whole_world_and_the_other_one_rank(ranks, dp, tp):
    for rank, seen in enumerate(ranks(4).call(look_at_shape, dp=dp, tp=tp)):
        assert {len(seen.dp), len(seen.tp)} == {1, 4}
        assert seen.reached == {"dp": seen.dp, "tp": seen.tp}
        assert rank in seen.dp
        assert rank in seen.tp


def test_a_mesh_that_is_not_the_world_is_refused_once_and_the_ranks_stay_usable(ranks):
    with pytest.raises(ConfigError, match="mesh dp_replicate=2 tp=2 needs 4 ranks, but the world has 2") as caught:
        ranks(2).call(look_at_shape, dp=2, tp=2)
    assert str(caught.value).count("needs 4 ranks") == 1
    assert ranks(2).call(look_at_shape, dp=1, tp=2)[0].tp == (0, 1)


def build_twice() -> tuple[bool, float]:
    first, second = build_mesh(MeshShape(dp_replicate=2, tp=2)), build_mesh(MeshShape(dp_replicate=2, tp=2))
    assert first.tp.group is not None
    timeout: timedelta = first.tp.group._get_backend(torch.device("cpu")).options._timeout
    return first.tp.group is second.tp.group and first.dp.group is second.dp.group, timeout.total_seconds()


def test_meshes_of_one_shape_share_their_groups_and_these_have_the_timeout_of_the_world(ranks):
    """torch gives a new group its own timeout of half an hour."""
    assert ranks(4).call(build_twice) == [(True, TIMEOUT_S)] * 4


def sum_over_subgroup(dp: int, tp: int, partition: tuple[tuple[int, ...], ...]) -> tuple[int, float]:
    mesh = build_mesh(MeshShape(dp_replicate=dp, tp=tp))
    axis = mesh.build_subgroup("tp/kv", partition)
    assert mesh.build_subgroup("tp/kv", partition) is axis
    assert axis.name == "tp/kv"
    return axis.degree, collectives.all_reduce(torch.tensor([float(2**mesh.rank)]), axis).item()


@pytest.mark.parametrize(
    ("dp", "tp", "partition", "expected"),
    [
        (1, 4, ((0, 1), (2, 3)), [(2, 3), (2, 3), (2, 12), (2, 12)]),
        (1, 4, ((0, 1, 2), (3,)), [(3, 7), (3, 7), (3, 7), (1, 8)]),
        (2, 2, ((0, 1),), [(2, 3), (2, 3), (2, 12), (2, 12)]),
        (1, 3, ((0, 2),), [(2, 5), (1, 2), (2, 5)]),
    ],
)
def test_a_subgroup_of_tp_is_cut_alike_on_every_dp_rank(ranks, dp, tp, partition, expected):
    """FIELD 3.10: the ranks that share a KV head have a group of their own for its gradient."""
    assert ranks(dp * tp).call(sum_over_subgroup, dp=dp, tp=tp, partition=partition) == expected


def look_at_device_mesh(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[Seen, float]:
    mesh = build_mesh_from(init_device_mesh("cpu", shape, mesh_dim_names=names))
    pairs = mesh.build_subgroup("tp/kv", (tuple(range(mesh.tp.degree)),))
    return look_at(mesh), collectives.all_reduce(torch.tensor([float(2**mesh.rank)]), pairs).item()


def test_a_device_mesh_keeps_its_own_order_of_ranks(ranks):
    seen, sums = zip(*ranks(4).call(look_at_device_mesh, names=("tp", "dp"), shape=(2, 2)), strict=True)
    assert [rank.tp for rank in seen] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [rank.coordinates for rank in seen] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(rank.reached == {"dp": rank.dp, "tp": rank.tp} for rank in seen)
    assert sums == (5.0, 10.0, 5.0, 10.0)


def test_a_device_mesh_may_have_tp_alone(ranks):
    seen, _ = ranks(2).call(look_at_device_mesh, names=("tp",), shape=(2,))[1]
    assert (seen.dp, seen.tp) == ((1,), (0, 1))


@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "tp")])
def test_a_device_mesh_with_other_axes_is_refused(ranks, names):
    with pytest.raises(ShardingError, match="but a model is parallelized over `tp`"):
        ranks(4).call(look_at_device_mesh, names=names, shape=(2, 2))


def count_groups() -> int:
    build_mesh(MeshShape(dp_replicate=2, tp=2)).build_subgroup("tp/kv", ((0, 1),))
    before = len(dist.distributed_c10d._world.pg_map)
    build_mesh(MeshShape(dp_replicate=2, tp=2)).build_subgroup("tp/kv", ((0, 1),))
    return len(dist.distributed_c10d._world.pg_map) - before


def test_subgroups_are_not_built_again_for_a_new_mesh_of_the_same_shape(ranks):
    assert ranks(4).call(count_groups) == [0] * 4


def refuse_after_uneven_subgroups() -> int:
    sum_over_subgroup(1, 4, ((0, 1, 2), (3,)))
    if dist.get_rank() == 0:
        raise ConfigError("a")
    raise ConfigError("b")


def test_ranks_in_subgroups_of_different_sizes_are_in_step_all_the_same(ranks):
    pool = ranks(4)
    with pytest.raises(ConfigError, match=r"rank 0 .*: a\nrank 1 .*, rank 2 .*, rank 3 .*: b"):
        pool.call(refuse_after_uneven_subgroups)
    assert pool.failure is None
