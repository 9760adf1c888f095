"""What is known of the machine without measuring it."""

import os
import platform
import socket
from collections.abc import Iterable
from pathlib import Path

import torch

from plait.comm.mesh import Axis
from plait.overlap.machine.cache import Key

_PROBE = 2
"""Raised when what is measured changes, so that rates of before are measured again."""


def build_key(
    axis: Axis, transports: Iterable[str], hosts: Iterable[str], *, device: torch.device, dtype: torch.dtype
) -> Key:
    """All that decides the rates of `axis`, the same on all of its ranks if they are alike."""
    return {
        "hosts": sorted(set(hosts)),
        "processor": name_processor(),
        "num_cores": count_cores(),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "probe": _PROBE,
        "num_threads": torch.get_num_threads(),
        "num_ranks": axis.degree,
        "dtype": str(dtype).removeprefix("torch."),
        "transports": sorted(transports),
    }


def name_host() -> str:
    """This host, and its network: a container or namespace has one of its own, whatever its host is called."""
    try:
        network = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        network = ""
    return f"{socket.gethostname()} {network}".strip()


def count_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def name_processor() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
