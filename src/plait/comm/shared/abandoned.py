"""Files that somebody holds while they have a name that does not stay: without its holder such a file is a leftover."""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
"""A file system in memory."""
PREFIX = "plait-"
"""How the names of our files in it begin."""


def create_held(path: Path, mode: int = 0o600) -> int:
    """A new file, this user's alone by default, that is held until its descriptor, which is returned, is closed.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):  # a file system without locks, on which nobody finds a file abandoned either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        # Between the two calls somebody found a file that nobody held.
        os.close(file)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove the files that nobody holds: those of processes that were killed."""
    for path in paths:
        with suppress(OSError):
            file = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


def remove_abandoned_memory() -> None:
    """Give back the memory of ranks that were killed before they had unnamed it."""
    remove_abandoned(MEMORY.glob(f"{PREFIX}*"))
