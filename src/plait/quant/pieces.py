"""Rows of a matrix, some at a time."""

from collections.abc import Iterator

import torch

_PIECE = 1 << 16
"""Numbers at a time, 256 KiB in float32."""

_UNIT = 32
"""Rows that every block format and the Hadamard transform divide."""


def list_pieces(device: torch.device, height: int, width: int) -> Iterator[slice]:
    """Whole blocks of rows, so few that on a CPU what is made of them stays in its cache; elsewhere all at once.

    Memory that is new costs a CPU 4 ns for each float32, more than most steps of quantizing.
    """
    step = max(1, _PIECE // max(1, width * _UNIT)) * _UNIT if device.type == "cpu" else max(1, height)
    for start in range(0, height, step):
        yield slice(start, min(start + step, height))
