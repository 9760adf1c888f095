"""Checkpoints as whoever has torch, and nothing of plait, reads them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def read_with_torch(folder: Path) -> dict[str, Any]:
    """The nested dicts of a checkpoint, every tensor whole."""
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "whole.pt"
        dcp_to_torch_save(folder, path)
        found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor by its name in the checkpoint."""
    return dict(_flatten(read_with_torch(folder), ()))


def _flatten(held: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for key, value in held.items():
        if isinstance(value, Tensor):
            yield ".".join((*keys, key)), value
        elif isinstance(value, Mapping):
            yield from _flatten(value, (*keys, key))
