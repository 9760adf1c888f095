"""What a rank computed, on its way to the process that judges it: tensors in a file, with what of which each is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait.sharding import Interval

Intervals = tuple[Interval, ...]
"""One of every dim."""


@dataclass(frozen=True)
class Part:
    """What a rank has of a tensor.

    Attributes:
        shape: of the whole tensor.
        intervals: of each dim.
        index: of the piece in the rank's file.
    """

    shape: tuple[int, ...]
    intervals: Intervals
    index: int


Parts = Mapping[str, Sequence[Part]]
"""By quantity and name what a rank has of a tensor: nothing, a piece, or several."""


class Pieces:
    """One rank's own parts of tensors, by quantity and name; of one tensor it may have several, or none."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Part]] = {}
        self._tensors: list[Tensor] = []

    def add(self, quantity: str, name: str, shape: Sequence[int], intervals: Intervals, tensor: Tensor) -> None:
        """Take a copy of this rank's part of a tensor of global `shape`."""
        lengths = [len(interval) for interval in intervals]
        assert list(tensor.shape) == lengths, f"{quantity}: {name}: {list(tensor.shape)} is not {lengths}"
        part = Part(tuple(shape), intervals, len(self._tensors))
        self.parts.setdefault(f"{quantity}: {name}", []).append(part)
        self._tensors.append(tensor.detach().cpu().clone(memory_format=torch.contiguous_format))

    def add_whole(self, quantity: str, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor of which this rank has all."""
        intervals = tuple(Interval(0, size) for size in tensor.shape)
        self.add(quantity, name, tensor.shape, intervals, tensor)

    def save(self, folder: str, rank: int) -> None:
        """Write them for `Assembly`."""
        torch.save(self._tensors, _path(folder, rank))


class Assembly:
    """The pieces of all ranks put together, and what of them should have been identical and is not.

    Every element of a tensor has to be on some rank, and pieces either lie apart or are the same.
    """

    def __init__(self, folder: str, parts: Sequence[Parts]) -> None:
        self._files = [torch.load(_path(folder, rank), mmap=True) for rank in range(len(parts))]
        self._parts = parts
        self.num_replicated = 0
        self.differing: list[str] = []

    def whole(self, quantity: str) -> dict[str, Tensor]:
        """Every tensor of `quantity`, by name, in the order in which ranks have them."""
        prefix = f"{quantity}: "
        keys = dict.fromkeys(key for parts in self._parts for key in parts if key.startswith(prefix))
        return {key.removeprefix(prefix): self._whole(key) for key in keys}

    def _whole(self, key: str) -> Tensor:
        holders: dict[Intervals, list[tuple[int, Tensor]]] = {}
        for rank, parts in enumerate(self._parts):
            for part in parts.get(key, ()):
                holders.setdefault(part.intervals, []).append((rank, self._files[rank][part.index]))
        for held in holders.values():
            self._compare_replicas(key, held)
        (shape,) = {part.shape for parts in self._parts for part in parts.get(key, ())}
        return _join(key, shape, {intervals: held[0][1] for intervals, held in holders.items()})

    def _compare_replicas(self, key: str, held: Sequence[tuple[int, Tensor]]) -> None:
        (first, piece), *others = held
        self.num_replicated += len(others)
        for rank, other in others:
            if not torch.equal(piece, other):
                self.differing.append(f"{key} differs between ranks {first} and {rank}")


def _join(key: str, shape: tuple[int, ...], pieces: Mapping[Intervals, Tensor]) -> Tensor:
    """The tensor of `shape` that the pieces cover, every element once."""
    if len(pieces) == 1:
        (whole,) = pieces.values()
        assert tuple(whole.shape) == shape, f"{key}: {list(whole.shape)} is all there is of {list(shape)}"
        return whole
    whole = next(iter(pieces.values())).new_empty(shape)
    count = torch.zeros(shape, dtype=torch.uint8)
    for intervals, piece in pieces.items():
        where = tuple(slice(each.start, each.stop) for each in intervals)
        whole[where] = piece
        count[where] += 1
    assert bool((count == 1).all()), f"{key}: pieces leave a gap in {list(shape)}, or overlap"
    return whole


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"
