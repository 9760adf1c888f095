"""Files that a command writes when its work is done: looked at before, and written whole or not at all."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from plait.errors import ConfigError


def list_unwritable(asked: Mapping[str, Path]) -> list[str]:
    """What is wrong with files, each beneath the option that asks for it: `--write`."""
    problems: list[str] = []
    taken: dict[Path, str] = {}
    for option, path in asked.items():
        if problem := _find_problem(path):
            problems.append(f"{option} {path}: {problem}")
        elif (where := path.resolve()) in taken:
            problems.append(f"{option} {path}: {taken[where]} writes there")
        else:
            taken[where] = option
    return problems


def _find_problem(path: Path) -> str:
    try:
        if path.is_dir():
            return "is a folder, and should be a file"
        folder = path.absolute().parent
        if not folder.is_dir():
            return f"there is no folder {path.parent}"
    except OSError as error:  # a name too long, a folder that may not be looked into
        return f"cannot be written: {error.strerror}"
    return "" if os.access(path if path.exists() else folder, os.W_OK) else "cannot be written: not allowed"


def write_file(path: Path, text: str) -> None:
    """Write a text; if that fails, what was in the file before is still there.

    Raises:
        ConfigError: it cannot be written.
    """
    where = path.resolve()
    is_special = where.exists() and not where.is_file()
    beside = where if is_special else where.with_name(f".{where.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(where)
    except OSError as error:
        if not is_special:
            with suppress(OSError):
                beside.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
