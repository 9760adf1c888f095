"""The device mesh as this rank sees it: its coordinates, and an axis with its process group for each direction."""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plait.comm import trace
from plait.comm.handle import Handled
from plait.comm.shared.memory import SharedMemory, build_shared_memory
from plait.errors import ConfigError, ShardingError
from plait.sharding import Coordinates, MeshShape, Split

Partition = tuple[tuple[int, ...], ...]
"""Disjoint sets of ranks."""


@dataclass(frozen=True, eq=False)
class Axis(Handled):
    """One direction of the mesh: the ranks that differ from this one in nothing else."""

    name: str
    degree: int
    rank: int
    """Position of this rank on the axis."""
    ranks: tuple[int, ...]
    """Global ranks on the axis, in order."""
    group: dist.ProcessGroup | None
    """None where the degree is 1: nothing is ever sent."""
    reduce_dtype: torch.dtype | None
    """The dtype in which sums over the axis are carried; None for that of the tensor."""
    shared: SharedMemory | None = None
    """Memory of all ranks of the axis, through which they move what is on the CPU; None to leave that to `group`."""
    unshared_because: str = "it was not asked for"
    """Why there is no shared memory, where there is none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: the copy of a model talks over the process groups that there are."""
        return self


@dataclass(eq=False)
class Mesh:
    """The device mesh as one rank sees it."""

    shape: MeshShape
    rank: int
    device: torch.device
    coordinates: Coordinates
    dp: Axis
    tp: Axis
    tp_groups: Partition
    """Every tp group of the world, which all have to be named when one of them is cut further."""
    tokens: Split | None = None
    """How the tokens of the forward pass under way are cut over tp; set where they enter a model."""
    token_unit: int = 1
    """How many tokens of a pass stay together, as a scale holds for all of them; that of the models on this mesh."""
    shares_memory: bool = False
    """Whether axes have shared memory, where they can."""
    _subgroups: dict[tuple[str, Partition], Axis] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: the copy of a model is on the same mesh."""
        return self

    def build_subgroup(self, name: str, partition: Partition) -> Axis:
        """The axis of the tp ranks that share a set of `partition` with this one; alone where none has it.

        Every rank of the world has to call it, with the same partition.
        """
        if (name, partition) not in self._subgroups:
            own = next((ranks for ranks in partition if self.tp.rank in ranks), (self.tp.rank,))
            groups = tuple(
                tuple(tp_group[rank] for rank in ranks) for tp_group in self.tp_groups for ranks in partition
            )
            members = tuple(self.tp.ranks[rank] for rank in own)
            axis = _build_axis(name, members, self.rank, groups, self.tp.reduce_dtype)
            self._subgroups[name, partition] = self._share(axis) if self.shares_memory else axis
        return self._subgroups[name, partition]

    def share_memory(self) -> None:
        """Let CPU ranks of one host move through shared memory what they would send each other.

        Every rank of the world has to call it, before anything takes an axis of this mesh. An axis whose ranks cannot
        share memory says why.
        """
        if self.shares_memory:
            return
        self.shares_memory = True
        self.dp, self.tp = self._share(self.dp), self._share(self.tp)
        self._subgroups = {key: self._share(axis) for key, axis in self._subgroups.items()}

    def _share(self, axis: Axis) -> Axis:
        if axis.group is None or self.device.type != "cpu":
            reason = "it has one rank" if axis.group is None else f"its tensors are on {self.device.type}"
            return replace(axis, unshared_because=reason)
        found = build_shared_memory(axis.group, axis.rank, axis.ranks, partial(_limit_wait_s, axis.group))
        return replace(axis, unshared_because=found) if isinstance(found, str) else replace(axis, shared=found)


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
    tp_groups = tuple(tuple(range(dp * shape.tp, (dp + 1) * shape.tp)) for dp in range(shape.dp))
    dp_groups = tuple(zip(*tp_groups, strict=True))
    coordinates = shape.coordinates(rank)
    trace.identify(f"rank {rank} ({coordinates})")
    mesh = Mesh(
        shape,
        rank,
        torch.device(device),
        coordinates,
        dp=_build_axis("dp", dp_groups[coordinates.tp], rank, dp_groups, reduce_dtype),
        tp=_build_axis("tp", tp_groups[coordinates.dp], rank, tp_groups, reduce_dtype),
        tp_groups=tp_groups,
    )
    if shared_memory:
        mesh.share_memory()
    return mesh


def build_mesh_from(device_mesh: DeviceMesh, *, reduce_dtype: torch.dtype | None = None) -> Mesh:
    """Take the axes named `dp` and `tp` of a torch DeviceMesh, with their process groups.

    Every rank of the world has to call it.

    Raises:
        ShardingError: the mesh has no axis `tp`, or axes with other names.
    """
    names = device_mesh.mesh_dim_names or ()
    if "tp" not in names or not set(names) <= {"dp", "tp"}:
        raise ShardingError(
            f"DeviceMesh has axes {names}, but a model is parallelized over `tp`, optionally beside `dp`",
            hint='name them: init_device_mesh(device_type, (dp, tp), mesh_dim_names=("dp", "tp"))',
        )
    axes = {name: _axis_of(device_mesh, name, reduce_dtype) for name in ("dp", "tp")}
    gathered: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, axes["tp"].ranks)
    rank = dist.get_rank()
    coordinates = Coordinates(dp=axes["dp"].rank, tp=axes["tp"].rank)
    trace.identify(f"rank {rank} ({coordinates})")
    return Mesh(
        MeshShape(dp=axes["dp"].degree, tp=axes["tp"].degree),
        rank,
        _own_device(device_mesh.device_type),
        coordinates,
        dp=axes["dp"],
        tp=axes["tp"],
        tp_groups=tuple(dict.fromkeys(gathered)),
    )


def _axis_of(device_mesh: DeviceMesh, name: str, reduce_dtype: torch.dtype | None) -> Axis:
    if name not in (device_mesh.mesh_dim_names or ()):
        return Axis(name, 1, 0, (dist.get_rank(),), None, reduce_dtype)
    group = device_mesh.get_group(name)
    ranks = tuple(dist.get_process_group_ranks(group))
    is_alone = len(ranks) == 1
    return Axis(name, len(ranks), ranks.index(dist.get_rank()), ranks, None if is_alone else group, reduce_dtype)


def _own_device(device_type: str) -> torch.device:
    return (
        torch.device("cpu")
        if device_type == "cpu"
        else torch.device(device_type, torch.accelerator.current_device_index())
    )


def _build_axis(
    name: str, members: tuple[int, ...], rank: int, groups: Partition, reduce_dtype: torch.dtype | None
) -> Axis:
    shared = tuple(ranks for ranks in groups if len(ranks) > 1)
    group = _build_group(shared, members) if shared else None
    return Axis(name, len(members), members.index(rank), members, group if len(members) > 1 else None, reduce_dtype)


_groups: "WeakKeyDictionary[dist.ProcessGroup, dict[Partition, dist.ProcessGroup | None]]" = WeakKeyDictionary()
"""Process groups by what they partition, while the world they belong to exists: each costs sockets and a thread."""


def _build_group(groups: Partition, members: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The process group of `members`, one of `groups`; the world has to name all of them in the same order."""
    world = dist.group.WORLD
    assert world is not None, "a mesh of more than one rank is built after init_process_group"
    if members == tuple(range(world.size())):
        return world
    built = _groups.setdefault(world, {})
    if groups not in built:
        timeout = timeout_of(world)
        own = None
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=timeout, group_desc="plait")
            own = group if ranks == members else own
        built[groups] = own
    return built[groups]


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The collective timeout of a group; torch would give a new group its own default of half an hour."""
    options = getattr(group._get_backend(group._device_types[-1]), "options", None)
    return getattr(options, "_timeout", None)


def _limit_wait_s(group: dist.ProcessGroup) -> float:
    """For how long a rank waits for others of a group."""
    timeout = timeout_of(group)
    return float("inf") if timeout is None else timeout.total_seconds()
