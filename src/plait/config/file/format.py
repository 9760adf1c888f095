"""From a run config to the TOML file that loads as the same."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from plait.config.run import RunConfig


def format_run_config(run: RunConfig) -> str:
    """Everything that is set, in the order of the sections; what is at its default stays out."""
    tree = run.model_dump(exclude_unset=True, mode="json")
    tree["model"] = {"family": run.model.family, **tree["model"]}
    return "\n".join(_list_lines(tree, "")).lstrip("\n") + "\n"


def _list_lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """Plain values first, since those behind a table's head belong to that table."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    if name and values:
        yield f"\n[{name}]"
    for key, value in values.items():
        yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _list_lines(value, f"{name}.{key}".lstrip("."))
