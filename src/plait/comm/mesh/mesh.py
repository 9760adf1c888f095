"""All axes of the device mesh, as one rank sees them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from plait.comm.mesh.axis import Axis, build_axis, build_lone_group, share_memory
from plait.contract.context.sequences import Sequences
from plait.errors import ConfigError, ShardingError
from plait.sharding import AXES, Coordinates, MeshShape, Partition, Split, list_parts


@dataclass(eq=False)
class Mesh:
    """The device mesh as one rank sees it."""

    shape: MeshShape
    rank: int
    device: torch.device
    coordinates: Coordinates
    axes: dict[str, Axis]
    """Each of `AXES` and of `COMBINED`."""
    tp_groups: Partition
    """Every tp group of the world, which all have to be named when one of them is cut further."""
    ranks: Tensor
    """The global rank at each of the coordinates, a dim for each of `AXES`."""
    tokens: Split | None = None
    """How the tokens of the forward pass under way are cut over tp; set where they enter a model."""
    sequences: Sequences | None = None
    """What sequences the forward pass under way has, and which of their tokens this rank; set before it begins."""
    token_unit: int = 1
    """How many tokens of a pass stay together, as a scale holds for all of them; that of the models on this mesh."""
    shares_memory: bool = False
    """Whether axes have shared memory, where they can."""
    _subgroups: dict[tuple[str, Partition], Axis] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: the copy of a model is on the same mesh."""
        return self

    @property
    def tp(self) -> Axis:
        """Ranks that share every layer."""
        return self.axes["tp"]

    @property
    def cp(self) -> Axis:
        """Ranks that share every sequence."""
        return self.axes["cp"]

    @property
    def pp(self) -> Axis:
        """Ranks that hold the stages of one pipeline, the first stage first."""
        return self.axes["pp"]

    @property
    def dp(self) -> Axis:
        """Ranks that read different sequences: dp_replicate and dp_shard as one."""
        return self.axes["dp"]

    @property
    def dp_cp(self) -> Axis:
        """Ranks that see different tokens, over which losses and gradients are summed: dp and cp as one."""
        return self.axes["dp_cp"]

    @property
    def dp_replicate(self) -> Axis:
        """Ranks that hold the same of everything, and differ in what they see."""
        return self.axes["dp_replicate"]

    @property
    def dp_shard_cp(self) -> Axis:
        """Ranks that share out what is sharded over data-parallel ranks: dp_shard and cp as one."""
        return self.axes["dp_shard_cp"]

    def device_mesh(self, names: Sequence[str]) -> DeviceMesh:
        """A torch DeviceMesh of axes of this one, combined ones among them, on its process groups; no axis twice.

        Every rank of those axes has to call it. FSDP takes that of `("dp_replicate", "dp_shard_cp")`.

        Raises:
            ShardingError: there is no such axis, or one is named twice.
            ConfigError: there is no process group.
        """
        parts = [part for name in names for part in list_parts(name)]
        if not parts or len(set(parts)) < len(parts):
            raise ShardingError(
                f"a DeviceMesh of {tuple(names)} has the axes {', '.join(parts)}: each may be there once"
            )
        if not dist.is_initialized():
            raise ConfigError("a DeviceMesh has process groups, and none was started",
                              hint="call torch.distributed.init_process_group() first")  # fmt: skip
        axes = [self.axes[name] for name in names]
        groups = [build_lone_group(self.rank) if axis.group is None else axis.group for axis in axes]
        ranks = select_ranks(self.ranks, self.coordinates, parts).reshape([axis.degree for axis in axes])
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=tuple(names))

    def build_subgroup(self, name: str, partition: Partition) -> Axis:
        """The axis of the tp ranks that share a set of `partition` with this one; alone where none has it.

        Every rank of the world has to call it, with the same partition.
        """
        if (name, partition) not in self._subgroups:
            groups = tuple(
                tuple(tp_group[rank] for rank in ranks) for tp_group in self.tp_groups for ranks in partition
            )
            axis = build_axis(name, groups, self.rank, self.tp.reduce_dtype)
            self._subgroups[name, partition] = share_memory(axis, self.device) if self.shares_memory else axis
        return self._subgroups[name, partition]

    def build_ends(self) -> Axis:
        """The axis of the first and the last rank of the pipeline; those between are alone.

        Every rank of the world has to call it.
        """
        pipelines = self.ranks.movedim(AXES.index("pp"), -1).flatten(0, -2)
        groups = tuple((ranks[0], ranks[-1]) for ranks in pipelines.tolist())
        return build_axis("pp/ends", groups, self.rank, self.pp.reduce_dtype)

    def share_memory(self) -> None:
        """Let CPU ranks of one host move through shared memory what they would send each other.

        Every rank of the world has to call it, before anything takes an axis of this mesh. An axis whose ranks cannot
        share memory says why. Axes of the same ranks share one memory.
        """
        if self.shares_memory:
            return
        self.shares_memory = True
        known: dict[tuple[int, ...], Axis] = {}
        for name, axis in self.axes.items():
            if axis.ranks not in known:
                known[axis.ranks] = share_memory(axis, self.device)
            found = known[axis.ranks]
            self.axes[name] = replace(axis, shared=found.shared, unshared_because=found.unshared_because)
        self._subgroups = {key: share_memory(axis, self.device) for key, axis in self._subgroups.items()}


def select_ranks(ranks: Tensor, own: Coordinates, parts: Sequence[str]) -> Tensor:
    """The ranks that differ from the one at `own` in `parts` alone: a dim for each of them, in their order."""
    chosen = ranks[tuple(slice(None) if axis in parts else getattr(own, axis) for axis in AXES)]
    kept: list[str] = [axis for axis in AXES if axis in parts]
    return chosen.permute([kept.index(part) for part in parts])
