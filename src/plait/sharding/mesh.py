"""The axes of the device mesh and the coordinates of a rank on them."""

from dataclasses import dataclass
from typing import NamedTuple

from plait.errors import ShardingError


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
