"""A tensor's named dims, global shape and state on tp, printed as `[T/tp, D]` or `[T, D] partial(tp)`."""

from dataclasses import dataclass
from math import prod

from plait.errors import ShardingError
from plait.sharding.ownership import Split
from plait.sharding.placement import Partial, Placement, Shard


@dataclass(frozen=True)
class Layout:
    """Where every part of one tensor is.

    `dims` are the letters of `plait.sharding`, products written out (`N*H`); `split` says how a sharded dim is cut.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    placement: Placement
    split: Split | None = None

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape):
            raise ShardingError(f"dims {self.dims} and shape {self.shape} differ in length")
        if isinstance(self.placement, Shard) != (self.split is not None):
            raise ShardingError(f"[{', '.join(self.dims)}] is {self.placement} but its split is {self.split}")
        if isinstance(self.placement, Shard) and self.split and self.shape[self.placement.dim] != self.split.size:
            raise ShardingError(
                f"[{', '.join(self.dims)}] {self.shape}: dim {self.placement.dim} is cut as {self.split}"
            )

    def __str__(self) -> str:
        """Local shape as a division, the state behind it where the shape does not show it."""
        dims = list(self.dims)
        if isinstance(self.placement, Shard):
            dims[self.placement.dim] += "/tp"
        suffix = " partial(tp)" if isinstance(self.placement, Partial) else ""
        return f"[{', '.join(dims)}]{suffix}"

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what tp rank `rank` holds."""
        shape = list(self.shape)
        if isinstance(self.placement, Shard) and self.split is not None:
            shape[self.placement.dim] = self.split.lengths[rank]
        return tuple(shape)

    def local_numel(self, rank: int) -> int:
        """Elements that tp rank `rank` holds."""
        return prod(self.local_shape(rank))
