"""Where and when something was measured: without that a figure says nothing."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """The machine, what else it did at the start, and the date."""
    return {
        "cpu": _name_processor(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _name_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
