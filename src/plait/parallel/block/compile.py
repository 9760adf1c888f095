"""Compiling the forward of a block."""

import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.errors import ConfigError

Backend = str | Callable[..., Any]
"""What compiles a graph, as `torch.compile` takes it."""


def compile_forward(block: nn.Module, *, backend: Backend = "inductor") -> None:
    """Let `block` compute by one graph; blocks of a class share it, and what moves stays in the order of eager mode.

    What is hooked onto the block itself runs around the graph. Every rank compiles for itself.
    """
    block.forward = MethodType(_compile(type(block).forward, backend), block)


def check_compiler() -> None:
    """Check that inductor finds what it compiles kernels of a CPU with.

    Raises:
        ConfigError: there is no C++ compiler.
    """
    if torch.cuda.is_available():
        return
    wanted = [name for name in _load_settings().cpp.cxx if name]
    if not any(map(shutil.which, wanted)):
        raise ConfigError(
            f"train.compile: torch.compile needs a C++ compiler on a CPU, and there is no {' or '.join(wanted)}",
            hint="install g++, name another in the environment variable CXX, or set train.compile = false",
        )


@lru_cache
def _compile(forward: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    options: dict[str, Any] | None = {"compile_threads": _count_threads()} if backend == "inductor" else None
    return torch.compile(forward, fullgraph=True, dynamic=False, backend=backend, options=options)


def _count_threads() -> int:
    """Ranks share the cores: each would start as many processes that compile as there are, which wait for each other.

    With one, a rank compiles by itself.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return max(1, min(_load_settings().compile_threads or 1, (os.cpu_count() or 1) // ranks))


def _load_settings() -> Any:
    """Those of inductor, whose import takes long."""
    return import_module("torch._inductor.config")
