"""What a rank computed, on its way to the process that judges it: tensors in a file, with who owns what of each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from plait.sharding import Ownership


class Pieces:
    """One rank's own parts of tensors, by quantity and name."""

    def __init__(self) -> None:
        self.ownership: dict[str, Ownership] = {}
        self._tensors: dict[str, Tensor] = {}

    def add(self, quantity: str, ownership: Ownership, tensor: Tensor) -> None:
        """Take a copy of this rank's part of a tensor."""
        key = f"{quantity}: {ownership.name}"
        self.ownership[key] = ownership
        self._tensors[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)

    def save(self, folder: str, rank: int) -> None:
        """Write them for `assemble`."""
        torch.save(self._tensors, _path(folder, rank))


class Assembly:
    """The pieces of all ranks put together, and what of them should have been identical and is not."""

    def __init__(self, folder: str, ownership: Sequence[Mapping[str, Ownership]]) -> None:
        self._files = [torch.load(_path(folder, rank), mmap=True) for rank in range(len(ownership))]
        self._ownership = ownership[0]
        self.num_replicated = 0
        self.differing: list[str] = []

    def whole(self, quantity: str) -> dict[str, Tensor]:
        """Every tensor of `quantity`, by name."""
        prefix = f"{quantity}: "
        return {key.removeprefix(prefix): self._whole(key) for key in self._ownership if key.startswith(prefix)}

    def _whole(self, key: str) -> Tensor:
        ownership = self._ownership[key]
        pieces = [file[key] for file in self._files]
        groups = [tuple(range(len(pieces)))] if ownership.split is None else ownership.split.replica_groups
        for first, *others in groups:
            self._compare_replicas(key, pieces, first, others)
        own = [pieces[group[0]] for group in groups]
        return own[0] if ownership.dim is None else torch.cat(own, dim=ownership.dim)

    def _compare_replicas(self, key: str, pieces: Sequence[Tensor], first: int, others: Sequence[int]) -> None:
        self.num_replicated += len(others)
        for other in others:
            if not torch.equal(pieces[first], pieces[other]):
                self.differing.append(f"{key} differs between ranks {first} and {other}")


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.pt"
