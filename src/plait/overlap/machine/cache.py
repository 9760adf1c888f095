"""Measured rates, kept for a week in the user's cache folder, in a file for each kind of machine and group of ranks."""

import json
import os
import time
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.overlap.machine.rates import Rates

MAX_AGE_S = 7 * 86400.0
"""Rates that are older are measured again: drivers, cables and neighbours change."""

Key = Mapping[str, Any]
"""All that decides the rates: hosts, processor, device, versions, number of ranks and threads, transports."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/plait`, `~/.cache/plait` without it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait"


def rates_path(folder: Path, key: Key) -> Path:
    """The file of the rates of `key`."""
    digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"rates-{digest[:16]}.json"


def load_rates(folder: Path, key: Key) -> Rates | None:
    """The rates of `key`, if there are any that are not too old; a file that cannot be used is named in a warning."""
    path = rates_path(folder, key)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        age_s = time.time() - record["measured_at_s"]
        if record["key"] != key or not 0 <= age_s <= MAX_AGE_S:
            return None
        return Rates.from_json(record["rates"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        warnings.warn(f"{path}: ignored, and measured again ({error!r})", stacklevel=2)
        return None


def save_rates(folder: Path, key: Key, rates: Rates) -> None:
    """Keep the rates of `key`; a folder that cannot be written to is named in a warning."""
    path = rates_path(folder, key)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    record = {"key": key, "measured_at_s": time.time(), "rates": rates.to_json()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        warnings.warn(f"{path}: cannot be written ({error.strerror}), so rates are measured each time", stacklevel=2)
