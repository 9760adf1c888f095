"""Safetensors files, read by interval."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.checkpoint.spec import DTYPES, TensorSpec
from plait.errors import CheckpointError
from plait.sharding import Interval


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


_MAPPED_BYTES = 1 << 26
"""A file is opened anew after so much was read: what was read of a mapped file is in memory while it is open."""


class PieceReader:
    """The files of one checkpoint; opening one checks that it is as long as its header says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._num_read_bytes = 0

    def list_tensors(self, file: str) -> dict[str, TensorSpec]:
        """Every tensor of `file`, in its order.

        Raises:
            CheckpointError: it cannot be read, is truncated, or holds a dtype that torch does not know.
        """
        path = self._folder / file
        with _reporting(path):
            handle = self._handle(file)
            slices = {name: handle.get_slice(name) for name in handle.offset_keys()}
            kinds = {name: (piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
        unknown = sorted({kind for kind, _ in kinds.values()} - DTYPES.keys())
        if unknown:
            raise CheckpointError(f"{path}: holds tensors of {', '.join(unknown)}, which is not supported")
        return {name: TensorSpec(DTYPES[kind], shape) for name, (kind, shape) in kinds.items()}

    def read(self, file: str, name: str, intervals: tuple[Interval, ...]) -> Tensor:
        """Read one interval per dim, counted from the start of the piece."""
        with _reporting(self._folder / file):
            if not intervals:
                return self._handle(file).get_tensor(name)
            piece = self._handle(file).get_slice(name)
            read = torch.as_tensor(piece[tuple(slice(interval.start, interval.stop) for interval in intervals)])
            # Rows are read as a whole, also those of which only some columns are wanted.
            self._num_read_bytes += len(intervals[0]) * prod(piece.get_shape()[1:]) * read.element_size()
            if self._num_read_bytes > _MAPPED_BYTES:
                self._open.clear()
                self._num_read_bytes = 0
            return read

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        return self._open[file]
