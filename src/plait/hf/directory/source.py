"""Tensors of a model by FQN, read piece by piece from a Hugging Face directory or from a sharded checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint.names import model_name
from plait.checkpoint.read import Checkpoint
from plait.checkpoint.spec import TensorSpec
from plait.checkpoint.weights import WeightFiles
from plait.errors import CheckpointError
from plait.hf.directory.names import Match
from plait.hf.stored import Stored
from plait.sharding import Interval

Intervals = tuple[Interval, ...]

_COMPARED_BYTES = 64 << 20
"""How much of two tensors is compared at a time."""


class Source(Protocol):
    """Where a model's tensors come from."""

    def spec(self, fqn: str) -> TensorSpec:
        """Dtype and global shape."""

    def copy_into(self, target: Tensor, fqn: str, intervals: Intervals) -> None:
        """Fill `target` with an interval for every dim, in its own dtype."""


@dataclass(frozen=True)
class DirectorySource:
    """A Hugging Face directory, which may store a parameter within another tensor, or transposed."""

    files: WeightFiles
    stored: Mapping[str, Stored]
    match: Match

    def spec(self, fqn: str) -> TensorSpec:
        """Dtype and global shape."""
        stored = self.stored[fqn]
        dtype = self.files.entries[self.match.names[stored.name]].spec.dtype
        return TensorSpec(dtype, derive_part_shape(stored))

    def copy_into(self, target: Tensor, fqn: str, intervals: Intervals) -> None:
        """Fill `target` with an interval for every dim, in its own dtype."""
        stored = self.stored[fqn]
        piece = self.files.read(self.match.names[stored.name], locate(stored, intervals))
        target.copy_(piece.t() if stored.is_transposed and piece.dim() > 1 else piece)

    def check_twins(self) -> None:
        """Check that tensors which the model ties, and the files hold twice, are the same.

        Raises:
            CheckpointError: they differ, so that the config is not that of these weights.
        """
        for one, other in self.match.twins:
            specs = [self.files.entries[name].spec for name in (one, other)]
            if specs[0].shape != specs[1].shape or not self._is_equal(one, other, specs[0]):
                raise CheckpointError(
                    f"{self.files.folder}: {one} and {other} differ, but the config ties them",
                    hint="set tie_word_embeddings to false in config.json",
                )

    def _is_equal(self, one: str, other: str, spec: TensorSpec) -> bool:
        rows = max(1, _COMPARED_BYTES // max(1, spec.size_bytes // max(1, spec.shape[0])))
        for first in range(0, spec.shape[0], rows):
            taken = Interval(first, min(spec.shape[0], first + rows))
            intervals = (taken, *(Interval(0, size) for size in spec.shape[1:]))
            if not torch.equal(self.files.read(one, intervals), self.files.read(other, intervals)):
                return False
        return True


@dataclass(frozen=True)
class ShardedSource:
    """A checkpoint of ours, written on any mesh."""

    checkpoint: Checkpoint

    @property
    def fqns(self) -> Iterator[str]:
        """Of everything of the model."""
        start = model_name("")
        return (name.removeprefix(start) for name in self.checkpoint.names if name.startswith(start))

    def spec(self, fqn: str) -> TensorSpec:
        """Dtype and global shape."""
        return self.checkpoint.spec(model_name(fqn))

    def copy_into(self, target: Tensor, fqn: str, intervals: Intervals) -> None:
        """Fill `target` with an interval for every dim, in its own dtype."""
        self.checkpoint.read_piece(target, model_name(fqn), intervals)


def derive_part_shape(stored: Stored) -> tuple[int, ...]:
    """Global shape of a parameter, as its module has it."""
    shape = list(stored.shape)
    if stored.dim is not None and stored.interval is not None:
        shape[stored.dim] = len(stored.interval)
    return tuple(reversed(shape)) if stored.is_transposed else tuple(shape)


def locate(stored: Stored, intervals: Intervals) -> Intervals:
    """Where an interval for every dim of a parameter is in the tensor that a checkpoint holds."""
    own = list(reversed(intervals)) if stored.is_transposed else list(intervals)
    if stored.dim is not None and stored.interval is not None:
        start, within = stored.interval.start, own[stored.dim]
        own[stored.dim] = Interval(start + within.start, start + within.stop)
    return tuple(own)


def take_own_part(tensor: Tensor, own: Intervals, stored: Stored) -> tuple[Intervals, Tensor]:
    """What a rank that holds `own` of a checkpoint's tensor has of a parameter in it: which intervals, and a view."""
    region = locate(stored, tuple(Interval(0, size) for size in derive_part_shape(stored)))
    overlap = [held.intersect(wanted) for held, wanted in zip(own, region, strict=True)]
    part = tensor[tuple(slice(o.start - h.start, o.stop - h.start) for o, h in zip(overlap, own, strict=True))]
    starts = [max(0, each.start - wanted.start) for each, wanted in zip(overlap, region, strict=True)]
    intervals = [Interval(start, start + len(each)) for start, each in zip(starts, overlap, strict=True)]
    if stored.is_transposed and part.dim() > 1:
        return tuple(reversed(intervals)), part.t()
    return tuple(intervals), part


def take_part(whole: Tensor, stored: Stored) -> Tensor:
    """The part of a checkpoint's tensor that is a parameter, in the orientation of its module; a view."""
    part = whole
    if stored.dim is not None and stored.interval is not None:
        part = whole.narrow(stored.dim, stored.interval.start, len(stored.interval))
    return part.t() if stored.is_transposed and part.dim() > 1 else part
