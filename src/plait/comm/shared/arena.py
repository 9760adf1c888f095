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
from plait.comm.shared.abandoned import MEMORY as FOLDER
from plait.comm.shared.abandoned import PREFIX, create_held
from plait.comm.shared.flags import LINE_WORDS, WORD_BYTES, Flags
from plait.errors import TransportError
from plait.units import format_bytes

_ADVICE = f"enlarge {FOLDER} (docker run --shm-size, mount -o remount,size=...) or set overlap.transport=ring"

_PUNCH_HOLE = 1 | 2
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""

_MOST_EXTENSIONS = 1024
"""Each makes the memory of a channel larger by a good part, or is refused."""

_NUM_LINES = 1 + _MOST_EXTENSIONS // (LINE_WORDS * WORD_BYTES)
"""How many were tried, and a byte for each that says whether it was granted."""


class NoRoom(TransportError):
    """There is not so much shared memory; all ranks are told so, and nothing else has happened.

    Attributes:
        lack: how much there is not.
    """

    lack = ""


class Arena:
    """The file behind an axis's memory, which grows at its end; all ranks have it grow in the same order.

    The first rank takes the memory from the system before anybody touches it: there may be too little, and a process
    that touches what it cannot get is killed.
    """

    def __init__(self, file: int, flags: Flags, num_bytes: int) -> None:
        self._file, self._flags, self._size = file, flags, num_bytes
        self._num_tried = 0
        self._tried_word = flags.take(1)
        self._granted_byte = flags.take(_NUM_LINES - 1) * WORD_BYTES
        self._starts: dict[int, int] = {}
        weakref.finalize(self, os.close, file)

    @staticmethod
    def num_lines() -> int:
        """Lines of flags that it takes."""
        return _NUM_LINES

    def extend(self, num_bytes: int) -> Tensor:
        """More memory, as bytes.

        Raises:
            NoRoom: there is not so much.
        """
        number, self._num_tried = self._num_tried, self._num_tried + 1
        if number >= _MOST_EXTENSIONS or not self._ask(num_bytes, number):
            lack = describe_room(num_bytes)
            error = NoRoom(f"{trace.identity()}: {trace.last_collective()} failed: {lack}", hint=_ADVICE)
            error.lack = lack
            raise error
        start, self._size = self._size, self._size + num_bytes
        memory = torch.frombuffer(map_file(self._file, num_bytes, start), dtype=torch.uint8)
        self._starts[memory.data_ptr()] = start
        return memory

    def _ask(self, num_bytes: int, number: int) -> bool:
        """Whether the first rank got that much."""
        granted = self._granted_byte + number
        if self._flags.rank == 0:
            self._flags.bytes[granted] = self._take(num_bytes)
            self._flags.raise_to(self._tried_word, number + 1)
        self._flags.wait(self._tried_word, number + 1, 0)
        return self._flags.bytes[granted] == 1

    def _take(self, num_bytes: int) -> bool:
        try:
            os.posix_fallocate(self._file, self._size, num_bytes)
        except OSError:
            return False
        return True

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


def create_file(num_bytes: int, end: bytes) -> tuple[Path, int]:
    """A new file of `num_bytes`, the last of which are `end`, and the descriptor by which it is held.

    This user alone may open it. It is to be unlinked before it is let go.

    Raises:
        OSError: there is no such file system, or no room.
    """
    path = FOLDER / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    file = create_held(path)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        os.pwrite(file, end, num_bytes - len(end))
    except OSError:
        path.unlink()
        os.close(file)
        raise
    return path, file


def map_file(file: int, num_bytes: int, start: int = 0) -> mmap.mmap:
    """The bytes of a file as memory, present at once: a first touch of each page would be a fault of its own."""
    return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), offset=start)


def describe_room(num_bytes: int) -> str:
    """What is wanted of the file system and what it has."""
    room = os.statvfs(FOLDER)
    free, size = (format_bytes(blocks * room.f_frsize) for blocks in (room.f_bavail, room.f_blocks))
    return f"{format_bytes(num_bytes)} of shared memory are needed, but {FOLDER} has {free} of {size} left"
