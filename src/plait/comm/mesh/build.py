"""The mesh from a shape, whose process groups it starts, or from a torch DeviceMesh, whose groups it takes."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import trace
from plait.comm.mesh.axis import Axis, build_axis
from plait.comm.mesh.mesh import Mesh, select_ranks
from plait.errors import ConfigError, ShardingError
from plait.sharding import AXES, COMBINED, Coordinates, MeshShape, Partition, list_parts

_ALL = (*AXES, *COMBINED)


def build_mesh(
    shape: MeshShape,
    *,
    device: torch.device | str = "cpu",
    reduce_dtype: torch.dtype | None = None,
    shared_memory: bool = False,
) -> Mesh:
    """Arrange the ranks of the world as `shape`, tp varying fastest; with `shared_memory` as `Mesh.share_memory` says.

    Every rank has to call it. Meshes of one shape share their process groups.

    Raises:
        ConfigError: the world has another number of ranks.
    """
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if world_size != shape.world_size:
        advice = f"start {shape.world_size} ranks, or choose degrees whose product is {world_size}"
        if not dist.is_initialized():
            advice = "call torch.distributed.init_process_group() in every rank first, or use plait.LocalRanks"
        raise ConfigError(f"mesh {shape} needs {shape.world_size} ranks, but the world has {world_size}", hint=advice)
    coordinates = shape.coordinates(rank)
    trace.identify(f"rank {rank} ({shape.describe(coordinates)})")
    groups = {name: shape.list_groups(name) for name in _ALL}
    mesh = Mesh(
        shape,
        rank,
        torch.device(device),
        coordinates,
        {name: build_axis(shape.name(name), groups[name], rank, reduce_dtype) for name in _ALL},
        tp_groups=groups["tp"],
        ranks=torch.arange(world_size).reshape(shape.degrees),
    )
    if shared_memory:
        mesh.share_memory()
    return mesh


def build_mesh_from(device_mesh: DeviceMesh, *, reduce_dtype: torch.dtype | None = None) -> Mesh:
    """Take the axes of a torch DeviceMesh by their names, those of `AXES`, with their process groups.

    There has to be `tp`; an axis that is not there has one rank. `dp` stands for `dp_replicate`. Every rank of the
    world has to call it.

    Raises:
        ShardingError: the mesh has no axis `tp`, or axes with other names.
    """
    taken = _name_axes(device_mesh)
    rank, shape, coordinates, ranks = dist.get_rank(), *_arrange(device_mesh, taken)
    trace.identify(f"rank {rank} ({shape.describe(coordinates)})")
    own = {name: tuple(select_ranks(ranks, coordinates, list_parts(name)).flatten().tolist()) for name in _ALL}
    gathered: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    _check_order(device_mesh, gathered)
    axes: dict[str, Axis] = {}
    for name in _ALL:
        wide = [part for part in list_parts(name) if shape.degree(part) > 1]
        if len(wide) == 1:
            group, members = device_mesh.get_group(taken[wide[0]]), own[name]
            axes[name] = Axis(shape.name(name), len(members), members.index(rank), members, group, reduce_dtype)
        else:
            axes[name] = build_axis(shape.name(name), _list_groups(gathered, name), rank, reduce_dtype)
    device, tp_groups = _own_device(device_mesh.device_type), _list_groups(gathered, "tp")
    return Mesh(shape, rank, device, coordinates, axes, tp_groups, ranks)


def _list_groups(gathered: Sequence[Mapping[str, tuple[int, ...]]], name: str) -> Partition:
    return tuple(dict.fromkeys(own[name] for own in gathered))


def _check_order(device_mesh: DeviceMesh, gathered: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """A process group has its ranks in ascending order, and a place on an axis is a rank of its group."""
    for name in _ALL:
        descending = next((ranks for ranks in _list_groups(gathered, name) if list(ranks) != sorted(ranks)), None)
        if descending is not None:
            raise ShardingError(
                f"DeviceMesh has axes {device_mesh.mesh_dim_names}, along which {name} has the ranks {descending}, "
                "which do not ascend",
                hint=f"name its axes in the order {', '.join(AXES)}, over ascending ranks",
            )


def _name_axes(device_mesh: DeviceMesh) -> dict[str, str]:
    """What the DeviceMesh calls each of our axes that it has."""
    names = device_mesh.mesh_dim_names or ()
    known = {"dp" if axis == "dp_replicate" and "dp" in names else axis: axis for axis in AXES}
    if "tp" not in names or not set(names) <= set(known) or ("dp" in names and "dp_shard" in names):
        raise ShardingError(
            f"DeviceMesh has axes {names}, but a model is parallelized over `tp`, optionally beside `dp_replicate`, "
            "`dp_shard`, `cp` and `pp`",
            hint='name them: init_device_mesh(device_type, (dp, tp), mesh_dim_names=("dp_replicate", "tp"))',
        )
    return {known[name]: name for name in names}


def _arrange(device_mesh: DeviceMesh, taken: dict[str, str]) -> tuple[MeshShape, Coordinates, torch.Tensor]:
    """Its shape, where this rank is, and the ranks with a dim for each of our axes, in our order."""
    names = list(device_mesh.mesh_dim_names or ())
    place = device_mesh.get_coordinate()
    assert place is not None, f"rank {dist.get_rank()} is not on the DeviceMesh it was given"
    there = [axis for axis in AXES if axis in taken]
    dims = {axis: names.index(taken[axis]) for axis in there}
    shape = MeshShape(**{axis: device_mesh.size(dim) for axis, dim in dims.items()})
    ranks = device_mesh.mesh.cpu().permute([dims[axis] for axis in there]).reshape(shape.degrees)
    return shape, Coordinates(**{axis: place[dim] for axis, dim in dims.items()}), ranks


def _own_device(device_type: str) -> torch.device:
    return (
        torch.device("cpu")
        if device_type == "cpu"
        else torch.device(device_type, torch.accelerator.current_device_index())
    )
