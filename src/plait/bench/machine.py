"""Where and when something was measured: without that a figure says nothing."""

import os
import platform
from datetime import UTC, datetime
from typing import Any

import torch

from plait.overlap.machine.key import name_processor


def describe_machine() -> dict[str, Any]:
    """The machine, what else it did at the start, and the date."""
    return {
        "cpu": name_processor(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "date": datetime.now(UTC).date().isoformat(),
    }
