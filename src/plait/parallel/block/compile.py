"""Compiling the forward of a block."""

from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import nn


def compile_forward(block: nn.Module) -> None:
    """Let `block` compute by one graph; blocks of a class share it, and what moves stays in the order of eager mode.

    What is hooked onto the block itself runs around the graph.
    """
    block.forward = MethodType(_compile(type(block).forward), block)


@lru_cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, fullgraph=True, dynamic=False)
