"""The fused operations of CUDA symmetric memory on CPU tensors, as torch itself defines what they mean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from plait.overlap import chooser


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Let the operations work on CPU tensors; the names of those that were called."""
    called: list[str] = []

    def note(name: str, meaning: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return meaning(*args, **kwargs)

        return run

    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, note(name, getattr(symmetric_memory, f"_{name}_fallback")), "CPU")
    try:
        yield called
    finally:
        library._destroy()


@contextmanager
def reachable() -> Iterator[list[str]]:
    """Let the choice believe in them, too."""
    with stand_ins() as called, patch.object(chooser, "why_not", lambda axis, device: None):
        yield called
