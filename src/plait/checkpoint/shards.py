"""How tensors are spread over safetensors files, as Hugging Face does it, and the index of these files."""

import json
import re
from collections.abc import Mapping
from typing import Any

from plait.checkpoint.spec import TensorSpec
from plait.errors import ConfigError

SINGLE_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
"""Of every file: readers take the order of dims and the dtypes from it."""

DEFAULT_FILE_BYTES = 5_000_000_000

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_file_bytes(text: str) -> int:
    """`5GB`, `500 MB`, `2GiB` or a number, in bytes.

    Raises:
        ConfigError: it is none of these, or nothing.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found and found[2].upper() in _UNITS else 0
    if size < 1:
        raise ConfigError(f'"{text}" is not a size of a file', hint="write it as 5GB, 500MB or 2GiB")
    return size


def plan_files(specs: Mapping[str, TensorSpec], max_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, in the order given; a tensor larger than `max_bytes` has its own file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if spec.size_bytes > max_bytes:
            groups.insert(len(groups) - 1, [name])
            continue
        if filled + spec.size_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += spec.size_bytes
    groups = [group for group in groups if group]
    if len(groups) <= 1:
        return {SINGLE_FILE: groups[0] if groups else []}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def build_weight_index(files: Mapping[str, list[str]], specs: Mapping[str, TensorSpec]) -> str:
    """Text of `model.safetensors.index.json`, which says in which file each tensor is."""
    body: dict[str, Any] = {
        "metadata": {
            "total_parameters": sum(spec.numel for spec in specs.values()),
            "total_size": sum(spec.size_bytes for spec in specs.values()),
        },
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return json.dumps(body, indent=2, sort_keys=True) + "\n"
