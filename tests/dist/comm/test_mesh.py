"""The axes of a mesh are the right ranks in the right order, with groups that are built once."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from plait.comm import collectives, trace
from plait.comm.mesh import Mesh, build_mesh, build_mesh_from
from plait.errors import ConfigError, ShardingError
from plait.parallel.apply import parallelize
from plait.sharding import AXES, COMBINED, Coordinates, MeshShape
from tests.support.rank_pool import TIMEOUT_S


@dataclass(frozen=True)
class Seen:
    """What one rank sees of a mesh: of each axis its ranks, and those that an all-reduce of powers of two reached."""

    rank: int
    ranks: dict[str, tuple[int, ...]]
    reached: dict[str, tuple[int, ...]]
    names: dict[str, str]
    place: Coordinates
    who: str


def look_at(mesh: Mesh) -> Seen:
    reached = {}
    for name, axis in mesh.axes.items():
        bits = int(collectives.all_reduce(torch.tensor([2**mesh.rank]), axis))
        reached[name] = tuple(rank for rank in range(mesh.shape.world_size) if bits >> rank & 1)
        assert axis.ranks[axis.rank] == mesh.rank
        assert axis.degree == len(axis.ranks)
        assert (axis.group is None) == (axis.degree == 1)
    ranks, names = ({name: getattr(axis, what) for name, axis in mesh.axes.items()} for what in ("ranks", "name"))
    return Seen(mesh.rank, ranks, reached, names, mesh.coordinates, trace.identity())


def look_at_shape(shape: MeshShape) -> Seen:
    return look_at(build_mesh(shape))


def look_at_shared(shape: MeshShape) -> Seen:
    mesh = build_mesh(shape, shared_memory=True)
    assert all(axis.shared is not None for axis in mesh.axes.values() if axis.degree > 1)
    return look_at(mesh)


WORLDS = [
    MeshShape(dp_replicate=2, tp=2),
    MeshShape(dp_shard=2, cp=2),
    MeshShape(pp=2, tp=2),
    MeshShape(cp=2, tp=2),
    MeshShape(dp_replicate=2, dp_shard=2),
    MeshShape(pp=4),
    MeshShape(tp=4),
    MeshShape(dp_replicate=2, dp_shard=2, tp=2),
    MeshShape(dp_replicate=2, dp_shard=2, cp=2),
    MeshShape(pp=2, cp=2, tp=2),
    MeshShape(pp=2, dp_shard=2, tp=2),
    MeshShape(dp_replicate=2, cp=2, tp=2),
    MeshShape(dp_shard=2, cp=4),
]


def check_axes(shape: MeshShape, seen: list[Seen]) -> None:
    for rank, each in enumerate(seen):
        expected = {
            name: next(ranks for ranks in shape.list_groups(name) if rank in ranks) for name in (*AXES, *COMBINED)
        }
        assert each.ranks == each.reached == expected
        assert each.place == shape.coordinates(rank)
        assert each.who == f"rank {rank} ({shape.describe(each.place)})"


@pytest.mark.parametrize("shape", WORLDS, ids=str)
def test_every_axis_has_its_ranks_and_sums_over_them_alone(ranks, shape):
    """Gradients that are summed over too few or too many ranks train, and train something else."""
    check_axes(shape, ranks(shape.world_size).call(look_at_shape, shape=shape))


@pytest.mark.parametrize("shape", [MeshShape(dp_replicate=2, tp=2), MeshShape(dp_shard=2, cp=2)], ids=str)
def test_every_axis_sums_through_shared_memory_too(ranks, shape):
    check_axes(shape, ranks(4).call(look_at_shared, shape=shape))


def test_tp_is_on_neighbouring_ranks_and_the_others_across_them(ranks):
    shape = MeshShape(dp_replicate=2, cp=2, tp=2)
    seen = ranks(8).call(look_at_shape, shape=shape)[5]
    assert {name: seen.ranks[name] for name in ("tp", "cp", "dp", "dp_cp", "dp_shard_cp", "pp")} == {
        "tp": (4, 5), "cp": (5, 7), "dp": (1, 5), "dp_cp": (1, 3, 5, 7), "dp_shard_cp": (5, 7), "pp": (5,),
    }  # fmt: skip
    assert seen.who == "rank 5 (dp_replicate=1 cp=0 tp=1)"
    assert seen.names["dp_cp"] == "dp_cp"


def test_where_no_sequence_is_cut_sums_are_over_dp(ranks):
    seen = ranks(4).call(look_at_shape, shape=MeshShape(dp_shard=2, tp=2))[0]
    assert (seen.names["dp_cp"], seen.names["dp_shard_cp"]) == ("dp", "dp_shard")


def test_a_mesh_that_is_not_the_world_is_refused_once_and_the_ranks_stay_usable(ranks):
    with pytest.raises(ConfigError, match="mesh dp_replicate=2 tp=2 needs 4 ranks, but the world has 2") as caught:
        ranks(2).call(look_at_shape, shape=MeshShape(dp_replicate=2, tp=2))
    assert str(caught.value).count("needs 4 ranks") == 1
    assert ranks(2).call(look_at_shape, shape=MeshShape(tp=2))[0].ranks["tp"] == (0, 1)


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


@pytest.mark.parametrize("dp", ["dp", "dp_replicate", "dp_shard"])
def test_a_device_mesh_keeps_its_own_order_of_ranks(ranks, dp):
    seen, sums = zip(*ranks(4).call(look_at_device_mesh, names=("tp", dp), shape=(2, 2)), strict=True)
    assert [rank.ranks["tp"] for rank in seen] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [(getattr(rank.place, "dp_replicate" if dp == "dp" else dp), rank.place.tp) for rank in seen] == [
        (0, 0), (1, 0), (0, 1), (1, 1),
    ]  # fmt: skip
    assert all(rank.reached == rank.ranks for rank in seen)
    assert all(rank.ranks["dp_cp"] == rank.ranks["dp"] for rank in seen)
    assert sums == (5.0, 10.0, 5.0, 10.0)


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("dp_replicate", "dp_shard", "tp"), MeshShape(dp_replicate=2, dp_shard=2, tp=2)),
        (("dp_shard", "cp", "tp"), MeshShape(dp_shard=2, cp=2, tp=2)),
        (("pp", "cp", "tp"), MeshShape(pp=2, cp=2, tp=2)),
    ],
)
def test_a_device_mesh_in_our_order_is_the_mesh_of_its_shape(ranks, names, shape):
    check_axes(shape, [seen for seen, _ in ranks(8).call(look_at_device_mesh, names=names, shape=(2, 2, 2))])


def test_a_device_mesh_may_have_tp_alone(ranks):
    seen, _ = ranks(2).call(look_at_device_mesh, names=("tp",), shape=(2,))[1]
    assert (seen.ranks["dp"], seen.ranks["tp"]) == ((1,), (0, 1))


def look_at_slice() -> Seen:
    mesh = build_mesh_from(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_replicate", "tp"))["dp_replicate", "tp"])
    reached = {
        name: tuple(rank for rank in range(8) if int(collectives.all_reduce(torch.tensor([2**mesh.rank]), axis)) >> rank & 1)
        for name, axis in mesh.axes.items()
    }
    return Seen(mesh.rank, {}, reached, {}, mesh.coordinates, trace.identity())


def test_a_slice_of_a_device_mesh_is_a_mesh_of_its_own(ranks):
    """Who runs pipelines himself gives the rest of his mesh."""
    seen = ranks(8).call(look_at_slice)[6]
    assert (seen.reached["tp"], seen.reached["dp_cp"], seen.reached["pp"]) == ((6, 7), (4, 6), (6,))
    assert seen.who == "rank 6 (dp_replicate=1 tp=0)"


@pytest.mark.parametrize("names", [("dp", "cp"), ("ep", "tp"), ("dp", "tp", "dp_shard")])
def test_a_device_mesh_with_other_axes_is_refused(ranks, names):
    with pytest.raises(ShardingError, match="but a model is parallelized over `tp`"):
        ranks(4).call(look_at_device_mesh, names=names, shape=(2, 2, 1)[: len(names)])


def test_a_device_mesh_whose_data_axes_are_in_another_order_is_refused(ranks):
    with pytest.raises(ShardingError, match=r"along which dp_cp has the ranks \(0, 2, 1, 3\), which do not ascend"):
        ranks(4).call(look_at_device_mesh, names=("cp", "dp_shard", "tp"), shape=(2, 2, 1))


def look_back(shape: MeshShape, names: tuple[str, ...]) -> tuple[list, list[float], bool]:
    """The mesh for torch: its ranks, sums over each of its groups, and whether one is a group of ours."""
    mesh = build_mesh(shape)
    given = mesh.device_mesh(names)
    sums = []
    for name in names:
        x = torch.tensor([float(2**mesh.rank)])
        dist.all_reduce(x, group=given.get_group(name))
        sums.append(x.item())
    is_ours = all(mesh.axes[name].group in (None, given.get_group(name)) for name in names)
    assert given.get_coordinate() == tuple(mesh.axes[name].rank for name in names)
    return given.mesh.tolist(), sums, is_ours


def test_torch_gets_the_axes_that_fsdp_wants(ranks):
    shape = MeshShape(dp_replicate=2, dp_shard=2, tp=2)
    seen = ranks(8).call(look_back, shape=shape, names=("dp_replicate", "dp_shard_cp"))
    assert [each[0] for each in seen] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]] * 4
    assert seen[3][1:] == ([2**3 + 2**7, 2**1 + 2**3], True)


def test_torch_gets_an_axis_of_one_rank_too(ranks):
    seen = ranks(4).call(look_back, shape=MeshShape(dp_shard=2, cp=2), names=("pp", "dp_replicate", "dp_shard_cp"))
    assert [each[0] for each in seen] == [[[[0, 1, 2, 3]]]] * 4
    assert seen[2][1] == [4.0, 4.0, 15.0]


def fully_shard_on(shape: MeshShape) -> list[float]:
    mesh = build_mesh(shape)
    torch.manual_seed(0)
    linear = nn.Linear(4, 4, bias=False)
    nn.init.ones_(linear.weight)
    fully_shard(linear, mesh=mesh.device_mesh(("dp_replicate", "dp_shard_cp")))
    linear(torch.full((1, 4), float(mesh.dp_cp.rank))).sum().backward()
    return linear.weight.grad.full_tensor()[0].tolist()


def test_fsdp_runs_on_the_mesh_it_gets(ranks):
    """The mean of 0, 1, 2, 3 over replicas and shards, whatever tp is."""
    assert ranks(8).call(fully_shard_on, shape=MeshShape(dp_replicate=2, dp_shard=2, tp=2)) == [[1.5] * 4] * 8


@pytest.mark.parametrize(
    ("names", "message"), [(("dp", "dp_shard_cp"), "each may be there once"), (("ep",), "a mesh has no axis 'ep'")]
)
def test_axes_that_torch_cannot_get_are_refused(ranks, names, message):
    with pytest.raises(ShardingError, match=message):
        ranks(2).call(look_back, shape=MeshShape(tp=2), names=names)


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
