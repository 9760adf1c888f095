"""Hardware by name: the files that come with plait, the user's own, and what was measured on this machine."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from plait.config.file.toml import load_toml, merge_trees
from plait.errors import ConfigError, describe_nearest
from plait.planner.hardware.attribution import attribute
from plait.planner.hardware.build import build_hardware
from plait.planner.hardware.device import Hardware
from plait.planner.hardware.measured import measured_path

FOLDER = Path(__file__).parent / "catalog"
"""Of the files that come with plait."""

_UNCOVERED = "_uncovered"
"""Names for which there are no constants, each with the reason."""


def list_hardware() -> tuple[str, ...]:
    """The names of the catalog, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("[!_]*.toml")))


def load_hardware(source: str | Path) -> Hardware:
    """A catalog entry by its name or one of its aliases, in any case; a TOML file; or `measured`, this machine.

    Raises:
        ConfigError: there is no such hardware, there are no constants for it, or its file is wrong.
    """
    if source == "measured":
        path = measured_path()
        if not path.is_file():
            raise ConfigError(
                f"{path}: nothing has been measured here", hint="plait bench calibrate measures this machine"
            )
        return _load_file(path)
    name = None if isinstance(source, Path) else _aliases().get(_plain(source))
    if name is not None:
        return _load_entry(name)
    path = Path(source)
    if path.suffix == ".toml" or _is_file(path):
        return _load_file(path)
    reason = _uncovered().get(_plain(str(source)))
    if reason is not None:
        raise ConfigError(f'hardware "{source}" is not covered: {reason}', hint="write its constants into a TOML file")
    raise ConfigError(f'there is no hardware "{source}"', hint=describe_nearest(str(source).lower(), list_hardware()))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder that may not be looked into
        return False


@cache
def _load_entry(name: str) -> Hardware:
    return _load_file(FOLDER / f"{name}.toml")


def _load_file(path: Path) -> Hardware:
    where = path.name if path.parent == FOLDER else str(path)
    return build_hardware(load_tree(path), name=path.stem, where=where)


def load_tree(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file over the one it is based on, so that a variant writes its differences only.

    Raises:
        ConfigError: a file cannot be read, or they are based on each other.
    """
    tree = load_toml(path)
    base = tree.get("based_on")
    is_own = path.parent != FOLDER
    if base is None:
        return attribute(tree, {}, path) if is_own else tree
    below = _find_base(path, base)
    if below.resolve() in (*seen, path.resolve()):
        raise ConfigError(f"{path}: based_on: the files are based on each other")
    under = {key: value for key, value in load_tree(below, (*seen, path.resolve())).items() if key != "aliases"}
    return attribute(tree, under, path) if is_own else merge_trees(under, tree)


def _find_base(path: Path, base: Any) -> Path:
    if not isinstance(base, str):
        raise ConfigError(f"{path}: based_on: should be the name of a catalog entry or a file")
    if base.endswith(".toml"):
        return path.parent / base
    if base == "_accelerator":
        return FOLDER / "_accelerator.toml"
    name = _aliases().get(_plain(base))
    if name is None:
        raise ConfigError(
            f'{path}: based_on: there is no hardware "{base}"', hint=describe_nearest(base.lower(), list_hardware())
        )
    return FOLDER / f"{name}.toml"


@cache
def _aliases() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in list_hardware():
        tree = load_toml(FOLDER / f"{name}.toml")
        for alias in (name, *tree.get("aliases", ())):
            found[_plain(alias)] = name
    return found


@cache
def _uncovered() -> Mapping[str, str]:
    reasons = load_toml(FOLDER / f"{_UNCOVERED}.toml")
    return {_plain(name): reason for name, reason in reasons.items()}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
