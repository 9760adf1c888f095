"""Safetensors files written tensor by tensor, so that one of them is all that has to be in memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from plait.checkpoint.safetensors import sync
from plait.checkpoint.spec import DTYPE_NAMES, TensorSpec, sort_names
from plait.errors import CheckpointError

_ALIGNMENT_BYTES = 8


class TensorWriter:
    """A file of `specs`, whose tensors are given in the order of `sort_names`; the same bytes as the library writes.

    Leaving it without an error checks that all were given and brings them to disk.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._specs = specs
        self._left = sort_names(specs)
        header = _build_header(specs, self._left, metadata)
        self.size_bytes = len(header) + sum(spec.size_bytes for spec in specs.values())
        try:
            self._file = path.open("wb")
            self._file.write(header)
        except OSError as error:
            raise self._build_error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
            if kind is None:
                sync(self.path)
        except OSError as error:
            raise self._build_error(error) from error
        if kind is None and self._left:
            raise AssertionError(f"{self.path}: {', '.join(self._left[:5])} were not written")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor.

        Raises:
            CheckpointError: the disk is full, or cannot be written.
        """
        expected = self._left.pop(0)
        spec = self._specs[expected]
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, *spec), (name, expected, spec)
        contiguous = tensor.detach().cpu().contiguous()
        try:
            self._file.write(contiguous.flatten().view(torch.uint8).numpy().data)
        except OSError as error:
            raise self._build_error(error) from error

    def _build_error(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path}: cannot be written ({error.strerror or error})")


def _build_header(specs: Mapping[str, TensorSpec], names: list[str], metadata: Mapping[str, str] | None) -> bytes:
    """Length, then JSON padded with blanks so that the tensors behind it are aligned."""
    body: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name in names:
        dtype, shape = specs[name]
        end = offset + specs[name].size_bytes
        body[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
