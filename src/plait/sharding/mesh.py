"""The axes of the device mesh and the coordinates of a rank on them."""

from dataclasses import dataclass
from typing import NamedTuple

from plait.errors import ShardingError

MAX_TP = 1024
"""Ranks that may share a layer: each of them is listed in what is derived, and no machine has as many fast links."""


class Coordinates(NamedTuple):
    """Where one rank sits."""

    dp: int
    tp: int

    def __str__(self) -> str:
        return " ".join(f"{axis}={index}" for axis, index in self._asdict().items())


@dataclass(frozen=True)
class MeshShape:
    """Degrees of the axes; tp varies fastest, so that a tp group sits on neighbouring ranks (the fastest links)."""

    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp) < 1 or self.tp > MAX_TP:
            raise ShardingError(f"a mesh of {self} is not one: degrees are at least 1, and tp at most {MAX_TP}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank `rank`."""
        if not 0 <= rank < self.world_size:
            raise ShardingError(f"rank {rank} is not on the mesh {self}")
        return Coordinates(*divmod(rank, self.tp))

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp}"
