"""The axes of the device mesh and the coordinates of a rank on them."""

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, get_args

from plait.errors import ShardingError

MAX_TP = 1024
"""Ranks that may share a layer: each of them is listed in what is derived, and no machine has as many fast links."""

MAX_CP = 1024
"""Ranks that may share a sequence: each of them meets each other one in what is derived."""

MeshAxis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]

AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)
"""From the axis that varies slowest to the fastest: what moves most is between neighbours (the fastest links)."""

COMBINED: dict[str, tuple[MeshAxis, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
}
"""Axes taken together as one: ranks that read other sequences; that see other tokens, over which losses and gradients
are summed; that share out what is sharded over data-parallel ranks."""

Partition = tuple[tuple[int, ...], ...]
"""Disjoint sets of ranks."""


class Coordinates(NamedTuple):
    """Where one rank sits."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return " ".join(f"{axis}={index}" for axis, index in self._asdict().items())


@dataclass(frozen=True)
class MeshShape:
    """Degrees of the axes, in the order of `AXES`: tp varies fastest, pp slowest."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.degrees) < 1 or self.tp > MAX_TP:
            raise ShardingError(f"a mesh of {self} is not one: degrees are at least 1, and tp at most {MAX_TP}")

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degree of each of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Data-parallel degree: ranks that read different sequences."""
        return self.degree("dp")

    @property
    def sums(self) -> str:
        """The axis over which losses and gradients are summed, by name: `dp_cp`, or `dp` where no sequence is cut."""
        return self.name("dp_cp")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.degrees)

    def degree(self, axis: str) -> int:
        """How many ranks an axis, or several combined, have."""
        return prod(getattr(self, part) for part in list_parts(axis))

    def name(self, axis: str) -> str:
        """What an axis is called in traces and contracts: without `_cp` where sequences are not cut."""
        return axis.removesuffix("_cp") if self.cp == 1 else axis

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank `rank`."""
        if not 0 <= rank < self.world_size:
            raise ShardingError(f"rank {rank} is not on the mesh {self}")
        indices: list[int] = []
        for degree in reversed(self.degrees):
            rank, index = divmod(rank, degree)
            indices.insert(0, index)
        return Coordinates(*indices)

    def rank(self, coordinates: Coordinates) -> int:
        """The global rank at `coordinates`."""
        if not all(0 <= index < degree for index, degree in zip(coordinates, self.degrees, strict=True)):
            raise ShardingError(f"{coordinates} is not on the mesh {self}")
        rank = 0
        for index, degree in zip(coordinates, self.degrees, strict=True):
            rank = rank * degree + index
        return rank

    def list_groups(self, axis: str) -> Partition:
        """The ranks that differ in nothing but `axis`, or several combined, in order: each set of them."""
        parts = list_parts(axis)
        groups: dict[Coordinates, list[int]] = {}
        for rank in range(self.world_size):
            rest = self.coordinates(rank)._replace(**dict.fromkeys(parts, 0))
            groups.setdefault(rest, []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())

    def describe(self, coordinates: Coordinates) -> str:
        """`dp_replicate=1 tp=0`: where a rank sits, on tp and on axes that have more than one rank."""
        return _join(coordinates, self.degrees)

    def __str__(self) -> str:
        return _join(self.degrees, self.degrees)


def list_parts(axis: str) -> tuple[MeshAxis, ...]:
    """The axes that an axis is made of: itself, or those combined in it.

    Raises:
        ShardingError: there is no such axis.
    """
    if axis in COMBINED:
        return COMBINED[axis]
    for known in AXES:
        if axis == known:
            return (known,)
    raise ShardingError(f"a mesh has no axis {axis!r}", hint=f"it has {', '.join([*AXES, *COMBINED])}")


def _join(numbers: tuple[int, ...], degrees: tuple[int, ...]) -> str:
    """`dp_replicate=2 tp=4`; an axis of one rank says nothing, save tp."""
    shown = zip(AXES, numbers, degrees, strict=True)
    return " ".join(f"{axis}={number}" for axis, number, degree in shown if degree != 1 or axis == "tp")
