"""One rank's part of a tensor, as torch.distributed.checkpoint wants to be told of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from plait.checkpoint.names import STATE
from plait.sharding import Interval, Ownership


@dataclass(frozen=True)
class Owned:
    """What this rank holds of one tensor: the same record for every way in which a mesh cuts tensors.

    The three methods are torch's protocol for objects of other kinds than its own. A rank names the piece that it
    writes, or the piece that it wants; torch finds out from which pieces of other ranks, on another mesh, that comes.
    """

    shape: tuple[int, ...]
    """Of the whole tensor."""
    intervals: tuple[Interval, ...]
    """What `tensor` is of it: one for every dim."""
    tensor: Tensor
    is_written: bool
    """Whether this rank, of all that hold these elements, is the one that writes them."""

    def __create_write_items__(self, fqn: str, owned: "Owned") -> list[WriteItem]:
        """The piece, where this rank writes it and it is not empty."""
        is_written = self.is_written and self.tensor.numel()
        return [build_write_item(fqn, self.shape, self.intervals, self.tensor.dtype)] if is_written else []

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the piece is in the whole."""
        return [_build_chunk(self.intervals)] if self.tensor.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The piece itself."""
        return self.tensor


Tensors = Mapping[str, Owned]
"""By name in the checkpoint."""


def build_owned(ownership: Ownership, tensor: Tensor, tp_rank: int = 0, *, is_replica_written: bool = True) -> Owned:
    """The record of a tensor that is cut over tp alone, and held by several tp groups of which one writes it."""
    is_written = is_replica_written and ownership.is_counted_on(tp_rank)
    return Owned(ownership.shape, ownership.intervals(tp_rank), tensor, is_written)


def build_write_item(name: str, shape: Sequence[int], intervals: Sequence[Interval], dtype: torch.dtype) -> WriteItem:
    """What is to be written of a tensor, before there is any tensor."""
    chunk = _build_chunk(intervals)
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def build_state_item() -> WriteItem:
    """What is to be written of the run beside its tensors: a dict of plain values."""
    return WriteItem(MetadataIndex(STATE), WriteItemType.BYTE_IO)


def _build_chunk(intervals: Sequence[Interval]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        torch.Size([interval.start for interval in intervals]), torch.Size([len(interval) for interval in intervals])
    )
