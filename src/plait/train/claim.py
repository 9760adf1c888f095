"""One run at a time in a folder: two would mix their checkpoints and metrics. A killed one leaves nothing there."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.checkpoint.names import WRITING
from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.errors import ConfigError, TransportError


@contextmanager
def claim_folder(folder: Path, mesh: Mesh) -> Iterator[None]:
    """Keep other runs out of `folder` inside the block, on every rank of the mesh; one that was killed keeps none out.

    Raises:
        ConfigError: on every rank, if another run is there, or the folder cannot be made.
    """
    descriptor = None
    with together(mesh):
        if mesh.rank == 0:
            descriptor = _lock(folder)
            _remove_leftovers(folder)
    try:
        yield
    except TransportError:
        if mesh.rank != 0:
            # The first rank, which clears up what it wrote, may be the one that is gone.
            clear_leftovers(folder)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def check_unclaimed(folder: Path) -> None:
    """Say at once, before ranks are started to find out, that they could not write in `folder`.

    Raises:
        ConfigError: another run is there.
    """
    if folder.is_dir():
        os.close(_lock(folder))


def clear_leftovers(folder: Path) -> None:
    """Remove what a run that was killed was writing in `folder`, if no run is there."""
    if not folder.is_dir():
        return
    try:
        descriptor = _lock(folder)
    except ConfigError:
        return
    _remove_leftovers(folder)
    os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    for leftover in [*folder.glob(f"{WRITING}*"), *folder.glob(f"checkpoints/{WRITING}*")]:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror})", hint="set out_dir and name") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"{folder}: another run is writing there", hint="wait until it has ended, or give this run another name"
        ) from error
    except OSError:
        pass  # a file system without locks keeps nobody out
    return descriptor
