"""Catalog entries with some constants changed, and the measured rows that are there to be read."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from plait.config.file.toml import merge_trees
from plait.planner.hardware import Hardware, build_hardware
from plait.planner.hardware.catalog import FOLDER, load_tree
from tests.support.source_tree import ROOT

Row = dict[str, Any]


def build_variant(name: str, changes: Mapping[str, object]) -> Hardware:
    """`{"memory.bandwidth": "9 TB/s"}`: the entry `name` with other values, their sources as they were."""
    tree = load_tree(FOLDER / f"{name}.toml")
    for key, value in changes.items():
        entry = _find(tree, key)
        changed: object = {**entry, "value": value} if isinstance(entry, Mapping) else value
        for part in reversed(key.split(".")):
            changed = {part: changed}
        assert isinstance(changed, dict)
        tree = merge_trees(tree, changed)
    return build_hardware(tree, name=name, where=f"{name} changed")


def scale_links(name: str, *, latency: float, bandwidth: float) -> Hardware:
    """The entry `name` with every latency and every bandwidth of links and network times a factor."""
    tree = load_tree(FOLDER / f"{name}.toml")
    changes: dict[str, object] = {}
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for degree, entry in tree["collectives"][kind].items():
            if degree != "source":
                pieces = [[_times(alpha, latency), _times(beta, bandwidth)] for alpha, beta in entry["pieces"]]
                tree["collectives"][kind][degree] = {**entry, "pieces": pieces}
    for key, factor in (
        ("collectives.p2p", bandwidth),
        ("collectives.host_launch", latency),
        ("topology.nic_bandwidth", bandwidth),
        ("topology.nic_latency", latency),
    ):
        entry = _find(tree, key)
        changes[key] = _times(entry["value"] if isinstance(entry, Mapping) else entry, factor)
    for key, value in changes.items():
        table, _, last = key.partition(".")
        entry = tree[table][last]
        tree[table] = {**tree[table], last: {**entry, "value": value} if isinstance(entry, Mapping) else value}
    return build_hardware(tree, name=name, where=f"{name} scaled")


@cache
def _read_rows() -> tuple[Row, ...]:
    text = (ROOT / "benchmarks" / "published.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def list_rows(prefix: str) -> Iterator[Row]:
    """The measured rows whose id begins with `prefix`."""
    return (row for row in _read_rows() if row["id"].startswith(prefix))


def _times(quantity: str, factor: float) -> str:
    number, unit = quantity.split()
    return f"{float(number) * factor!r} {unit}"


def _find(tree: Mapping[str, Any], key: str) -> Any:
    found: Any = tree
    for part in key.split("."):
        found = found[part]
    return found
