"""Token files, mapped into memory: shards that a user brings, or the one that text was turned into."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from plait.comm.shared.abandoned import create_held, remove_abandoned
from plait.errors import ConfigError

Tokens = NDArray[np.integer[Any]]

_MAGIC = 20240520
"""First int32 of a token shard of llm.c and modded-nanogpt: 256 int32 of header, then uint16 tokens."""


class TokenStream:
    """Shards laid end to end, of which any range can be read."""

    def __init__(self, shards: Sequence[Tokens]) -> None:
        self._shards = shards
        self._starts = [0, *accumulate(map(len, shards))]

    @classmethod
    def from_files(cls, files: Sequence[Path]) -> Self:
        """Map token files; nothing but their headers is read.

        Raises:
            ConfigError: a file is not what its suffix says.
        """
        return cls([_map_file(file) for file in files])

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start <= i < stop`."""
        parts = []
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            offset = self._starts[shard]
            end = min(stop, self._starts[shard + 1])
            parts.append(self._shards[shard][start - offset : end - offset].astype(np.int64))
            start, shard = end, shard + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def fingerprint(self, samples: int = 64, width: int = 64) -> str:
        """A digest of the length and of samples along the stream, for telling one corpus from another at once."""
        digest = blake2b(str(len(self)).encode(), digest_size=8)
        for sample in range(samples):
            start = sample * max(0, len(self) - width) // max(1, samples - 1)
            digest.update(self.read(start, min(len(self), start + width)).tobytes())
        return f"{len(self)} tokens, {digest.hexdigest()}"

    def find_outside(self, vocab_size: int) -> int | None:
        """A token id that is not in `0:vocab_size`, if there is one; reads everything."""
        extremes = (int(found) for shard in self._shards if len(shard) for found in (shard.min(), shard.max()))
        return next((token for token in extremes if not 0 <= token < vocab_size), None)


def _map_file(file: Path) -> Tokens:
    try:
        return _map_array(file) if file.suffix == ".npy" else _map_raw(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: is not a token file ({error})", hint=_HINT) from error


_HINT = "token files are .npy with one dim of integers, or .bin with uint16 (with or without the header of llm.c)"


def _map_array(file: Path) -> Tokens:
    array: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"it is {array.dtype} {list(array.shape)}")
    return array


def _map_raw(file: Path) -> Tokens:
    size_bytes = file.stat().st_size
    header = np.fromfile(file, dtype="<i4", count=256)
    if len(header) == 256 and header[0] == _MAGIC:
        if size_bytes != header.nbytes + 2 * int(header[2]):
            raise ValueError(f"{size_bytes} bytes where the header says {header[2]} tokens")
        return np.memmap(file, dtype="<u2", mode="r", offset=header.nbytes)
    if size_bytes % 2:
        raise ValueError(f"{size_bytes} bytes are not whole uint16")
    return np.memmap(file, dtype="<u2", mode="r")


class TokenWriter:
    """A `.npy` file that grows, and gets its name when it is complete and its header is right."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        # Runs that start together on the same text each write their own; the last to finish wins, with the same tokens.
        self._path, self._beside = path, path.with_name(f".writing-{uuid4().hex}-{path.name}")
        remove_abandoned(path.parent.glob(".writing-*"))
        self._file = os.fdopen(create_held(self._beside, 0o666), "wb")
        self._length = 0
        self._write_header()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                self._file.seek(0)
                self._write_header()
            if kind is None:
                self._beside.replace(self._path)
        finally:
            self._beside.unlink(missing_ok=True)

    def append(self, tokens: Sequence[int]) -> None:
        self._file.write(np.asarray(tokens, self._dtype).tobytes())
        self._length += len(tokens)

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
