"""The arena: a file in memory that all ranks of an axis map. It has no name once they do, so nothing can be left."""

import ctypes
import mmap
import os
import secrets
import weakref
from pathlib import Path

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.shared.flags import Flags
from plait.errors import TransportError
from plait.units import format_bytes

FOLDER = Path("/dev/shm")
"""A file system in memory."""

_REFUSED = 1 << 62
_PUNCH_HOLE = 1 | 2
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""


class Arena:
    """The file behind an axis's memory, which grows at its end; all ranks have it grow in the same order.

    The first rank takes the memory from the system before anybody touches it: there may be too little, and a process
    that touches what it cannot get is killed.
    """

    def __init__(self, file: int, flags: Flags, num_bytes: int) -> None:
        self._file, self._flags, self._size = file, flags, num_bytes
        self._taken_word = flags.take(1)
        self._starts: dict[int, int] = {}
        weakref.finalize(self, os.close, file)

    def extend(self, num_bytes: int) -> Tensor:
        """More memory, as bytes.

        Raises:
            TransportError: there is not so much.
        """
        start, self._size = self._size, self._size + num_bytes
        if self._flags.rank == 0:
            try:
                os.posix_fallocate(self._file, start, num_bytes)
            except OSError:
                self._flags.raise_to(self._taken_word, _REFUSED)
            else:
                self._flags.raise_to(self._taken_word, self._size)
        self._flags.wait(self._taken_word, self._size, 0)
        if self._flags.words[self._taken_word] >= _REFUSED:
            raise TransportError(
                f"{trace.identity()}: {trace.last_collective()} failed: {describe_room(num_bytes)}",
                hint=f"enlarge {FOLDER} (docker run --shm-size, mount -o remount,size=...), or do not share memory",
            )
        memory = torch.frombuffer(map_file(self._file, num_bytes, start), dtype=torch.uint8)
        self._starts[memory.data_ptr()] = start
        return memory

    def release(self, memory: Tensor) -> None:
        """Give memory of `extend` back to the system; what it holds is lost to all ranks."""
        start = self._starts.pop(memory.data_ptr())
        if self._flags.rank == 0:
            _punch(self._file, start, memory.numel())

    @staticmethod
    def round_up(num_bytes: int) -> int:
        """A size that is not outgrown at once: whole pages, up to a quarter more."""
        unit = max(mmap.PAGESIZE, 1 << max(0, num_bytes.bit_length() - 3))
        return max(1, -(-num_bytes // unit)) * unit


def _punch(file: int, start: int, num_bytes: int) -> None:
    """Make a hole; a kernel that cannot leaves the memory where it is."""
    ctypes.CDLL(None).fallocate(
        ctypes.c_int(file), ctypes.c_int(_PUNCH_HOLE), ctypes.c_int64(start), ctypes.c_int64(num_bytes)
    )


def create_file(num_bytes: int, end: bytes) -> Path:
    """A new file of `num_bytes`, the last of which are `end`; this user alone may open it.

    Raises:
        OSError: there is no such file system, or no room.
    """
    path = FOLDER / f"plait-{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        os.pwrite(file, end, num_bytes - len(end))
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)
    return path


def map_file(file: int, num_bytes: int, start: int = 0) -> mmap.mmap:
    """The bytes of a file as memory, present at once: a first touch of each page would be a fault of its own."""
    return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), offset=start)


def describe_room(num_bytes: int) -> str:
    """What is wanted of the file system and what it has."""
    room = os.statvfs(FOLDER)
    free, size = (format_bytes(blocks * room.f_frsize) for blocks in (room.f_bavail, room.f_blocks))
    return f"{format_bytes(num_bytes)} of shared memory are needed, but {FOLDER} has {free} of {size} left"
