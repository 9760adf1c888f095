"""Where the constants of this machine are kept, and how measured rates become a catalog file."""

import platform
import re
from pathlib import Path

from plait.overlap.cache import cache_folder


def measured_path() -> Path:
    """The file that `plait bench calibrate` writes and `--hardware measured` reads, one for each machine."""
    machine = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node()) or "machine"
    return cache_folder() / f"hardware-{machine}.toml"
