"""One direction of the mesh, and the process groups of all that run the same way."""

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from plait.comm.handle import Handled
from plait.comm.shared.memory import SharedMemory, build_shared_memory
from plait.sharding import Partition


@dataclass(frozen=True, eq=False)
class Axis(Handled):
    """One direction of the mesh, or several as one: the ranks that differ from this one in nothing else."""

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


def build_axis(name: str, groups: Partition, rank: int, reduce_dtype: torch.dtype | None) -> Axis:
    """The axis of the ranks that share one of `groups` with global rank `rank`; alone where none has it.

    Every rank of the world has to call it, with the same groups.
    """
    members = next((ranks for ranks in groups if rank in ranks), (rank,))
    shared = tuple(ranks for ranks in groups if len(ranks) > 1)
    group = _build_group(shared, members) if shared else None
    return Axis(name, len(members), members.index(rank), members, group if len(members) > 1 else None, reduce_dtype)


def share_memory(axis: Axis, device: torch.device) -> Axis:
    """The axis with memory that its ranks share, or with the reason why they do not; every rank of it has to call."""
    if axis.group is None or device.type != "cpu":
        reason = "it has one rank" if axis.group is None else f"its tensors are on {device.type}"
        return replace(axis, unshared_because=reason)
    found = build_shared_memory(axis.group, axis.rank, axis.ranks, partial(_limit_wait_s, axis.group))
    return replace(axis, unshared_because=found) if isinstance(found, str) else replace(axis, shared=found)


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


def build_message_group(axis: Axis) -> dist.ProcessGroup | None:
    """The process group of an axis, for messages that others wait for; every rank of the axis has to call it.

    A message over gloo has the timeout that its group was started with, which for the world is that of starting up.
    """
    world = dist.group.WORLD
    if axis.group is None or world is None or axis.group is not world:
        return axis.group
    built = _groups.setdefault(world, {})
    if (axis.ranks,) not in built:
        built[axis.ranks,] = dist.new_group(list(axis.ranks), timeout=timeout_of(world), group_desc="plait messages")
    return built[axis.ranks,]


def build_lone_group(rank: int) -> dist.ProcessGroup:
    """The process group of one rank, for what wants a group of every axis; only that rank calls it."""
    world = dist.group.WORLD
    assert world is not None, "a group is built after init_process_group"
    built, alone = _groups.setdefault(world, {}), ((rank,),)
    if alone not in built:
        timeout = timeout_of(world)
        built[alone] = dist.new_group([rank], timeout=timeout, use_local_synchronization=True, group_desc="plait")
    found = built[alone]
    assert found is not None, f"rank {rank} is in a group of its own"
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The collective timeout of a group; torch would give a new group its own default of half an hour."""
    options = getattr(group._get_backend(group._device_types[-1]), "options", None)
    return getattr(options, "_timeout", None)


def _limit_wait_s(group: dist.ProcessGroup) -> float:
    """For how long a rank waits for others of a group."""
    timeout = timeout_of(group)
    return float("inf") if timeout is None else timeout.total_seconds()
