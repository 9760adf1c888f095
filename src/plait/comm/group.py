"""The process group of the world, and the device of this rank."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from plait.errors import ConfigError

START_TIMEOUT_S = 300.0
"""For ranks to find each other: importing torch takes a minute on a busy machine."""


def choose_device(local_rank: int, device_type: str | None = None) -> torch.device:
    """The CUDA device with the number of this rank on its host; the CPU where there is no CUDA, or if asked for.

    Raises:
        ConfigError: the host has fewer CUDA devices than ranks.
    """
    if device_type == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local_rank} of this host would take cuda:{local_rank}, but there are {torch.cuda.device_count()} "
            "CUDA devices",
            hint="start as many ranks on a host as it has devices, or set CUDA_VISIBLE_DEVICES= to run on the CPU",
        )
    return torch.device("cuda", local_rank)


def own_device() -> torch.device:
    """The device this rank computes on: the one its process group was started with, else the first."""
    if not dist.is_initialized():
        return choose_device(0)
    has_nccl = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


def find_memory(device: torch.device) -> int:
    """Bytes of memory that there are for all ranks on `device`, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def start_group(store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Start the process group of the world; from then on a collective that is not joined fails after `timeout_s`.

    On the CPU backend every rank connects to every other here, so it is also where they wait for each other.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=max(START_TIMEOUT_S, timeout_s)),
    )
    world = dist.group.WORLD
    assert world is not None, "init_process_group sets it"
    world.set_timeout(timedelta(seconds=timeout_s))
