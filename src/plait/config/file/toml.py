"""Reading TOML files and `key=value` overrides into one tree of plain values."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.config.section import Problem
from plait.errors import ConfigError

_KEY = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def load_toml(path: Path) -> dict[str, Any]:
    """Read one file.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:  # also of numbers too long, of brackets too deep
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def load_overrides(
    overrides: Sequence[str], shorthands: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """Read `train.steps=10` into a tree; the last of several for one key counts."""
    tree: dict[str, Any] = {}
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _KEY.fullmatch(key.strip()):
            hint = "overrides look like train.steps=100"
            problems.append(Problem(override, "an override must be of the form key=value", hint))
            continue
        value: Any = _parse_value(text.strip())
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        tree = merge_trees(tree, expand_shorthands(value, shorthands or {}))
    return tree, problems


def expand_shorthands(tree: Mapping[str, Any], shorthands: Mapping[str, str]) -> dict[str, Any]:
    """Turn the plain value of a section into the one key of its table that it stands for."""
    return {
        name: {shorthands[name]: value} if name in shorthands and not isinstance(value, Mapping) else value
        for name, value in tree.items()
    }


def merge_trees(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees; where both have a value, that of `over`."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge_trees(below, value)
        else:
            merged[key] = value
    return merged


def _parse_value(text: str) -> Any:
    """`10`, `true`, `[1, 2]` as in TOML; what is not a TOML value is a string as it stands (`model.preset=gpt2`)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text
