"""A user's file over the entry it is based on: what it states is attributed to it, not to the base's sources."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plait.planner.hardware.constant import Provenance
from plait.planner.hardware.reader import Tree

_WORDS = ("title", "aliases", "based_on", "sources", "regime")
"""Keys that are no constants."""

_INHERITED = ("source", "error")
"""What a table may say for all constants beneath it."""


def attribute(tree: Tree, under: Tree, path: Path) -> dict[str, Any]:
    """What the file `path` states, over `under`: a constant of its takes the place of all that `under` says of it.

    Its tables' sources are for its own constants, its sources for its own names, and a constant of it without any
    source is assumed, by the file.
    """
    own, known = _find_table(tree, "sources"), _find_table(under, "sources")
    names = {name: f"{name} of {path.name}" if known.get(name, each) != each else name for name, each in own.items()}
    sources = {names[name]: each for name, each in own.items()}

    def name_source(entry: Tree) -> dict[str, Any]:
        if "source" not in entry:
            sources[path.name] = _describe(path)
        named = entry.get("source", path.name)
        return {**entry, "source": names.get(named, named) if isinstance(named, str) else named}

    stated = _push_down(tree, name_source)
    return _lay_over(_push_down(under, dict), {**stated, **({"sources": sources} if sources else {})})


def _push_down(table: Tree, change: Callable[[Tree], dict[str, Any]], inherited: Tree | None = None) -> dict[str, Any]:
    """Every constant with all its attributes beside it, so that tables have none left."""
    passed = {**(inherited or {}), **{name: table[name] for name in _INHERITED if name in table}}
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in _WORDS:
            found[key] = value
        elif _is_constant(value):
            found[key] = change({**passed, **value})
        elif isinstance(value, Mapping):
            found[key] = _push_down(value, change, passed)
        elif key not in _INHERITED:
            found[key] = change({**passed, "pieces" if isinstance(value, list) else "value": value})
    return found


def _lay_over(under: Tree, over: Tree) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        is_table = isinstance(value, Mapping) and not _is_constant(value)
        merged[key] = _lay_over(below, value) if is_table and isinstance(below, Mapping) else value
    return merged


def _is_constant(value: object) -> bool:
    return isinstance(value, Mapping) and ("value" in value or "pieces" in value)


def _find_table(tree: Tree, key: str) -> Tree:
    table = tree.get(key)
    return table if isinstance(table, Mapping) else {}


def _describe(path: Path) -> dict[str, str]:
    """The file as a source, as of when it was last written."""
    date = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    return {"text": path.name, "date": date, "provenance": str(Provenance.ASSUMED), "confidence": "low"}
