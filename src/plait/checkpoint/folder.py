"""Folders that appear complete or not at all: written beside their place under another name, then renamed."""

import shutil
from contextlib import suppress
from pathlib import Path

from plait.checkpoint.names import INDEX, WRITING
from plait.checkpoint.safetensors import sync
from plait.errors import CheckpointError

_REPLACED = ".replaced-"

_SIGNS = (INDEX, "config.json")
"""What one of these is in, is a checkpoint: nothing else is ever replaced."""


def check_replaceable(final: Path, *, overwrite: bool) -> None:
    """Check that a checkpoint may be written to `final`.

    Raises:
        CheckpointError: something is there that is not to be lost.
    """
    if not final.exists() and not final.is_symlink():
        return
    if not final.is_dir() or final.is_symlink():
        raise CheckpointError(f"{final}: is in the way, and is no folder", hint="give a folder that does not exist yet")
    if not any(final.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(f"{final}: exists already", hint="give another folder, or allow it to be overwritten")
    if not any((final / sign).is_file() for sign in _SIGNS):
        raise CheckpointError(
            f"{final}: is not overwritten, as it is no checkpoint (it has neither {' nor '.join(_SIGNS)})",
            hint="give another folder",
        )


def begin_folder(final: Path, *, overwrite: bool = False) -> Path:
    """Make the folder in which what will be `final` is written.

    Raises:
        CheckpointError: it cannot be made, or `final` is not to be replaced.
    """
    check_replaceable(final, overwrite=overwrite)
    writing = writing_folder(final)
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{writing}: cannot be made ({error.strerror})") from error
    return writing


def writing_folder(final: Path) -> Path:
    """Where what will be `final` is written."""
    return final.absolute().with_name(f"{WRITING}{final.absolute().name}")


def publish_folder(writing: Path, final: Path) -> None:
    """Give a folder that is complete its name; what had the name before is removed when it has lost it.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    final = final.absolute()
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    try:
        for path in sorted(writing.rglob("*")):
            sync(path)
        sync(writing)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        try:
            writing.rename(final)
        except OSError:
            with suppress(OSError):
                replaced.rename(final)
            raise
        sync(final.parent)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written ({error.strerror})") from error
    with suppress(OSError):
        shutil.rmtree(replaced)


def write_text(path: Path, text: str) -> None:
    """Write one file of a folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from error


def discard_folder(writing: Path) -> None:
    """Remove what a save that failed has written."""
    shutil.rmtree(writing, ignore_errors=True)
