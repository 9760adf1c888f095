"""Buffers that a transport uses again from run to run."""

from collections import defaultdict

import torch
from torch import Tensor

_Shape = tuple[int, int, torch.dtype, torch.device]

_IDLE_RUNS = 2
"""How much may lie idle, in units of the most that was ever in use at once: shapes that come no more are given up."""


class Pool:
    """Uninitialized matrices by shape: fresh memory of 16 MiB and more costs a page fault for each 4 KiB, each time."""

    def __init__(self) -> None:
        self._idle: defaultdict[_Shape, list[Tensor]] = defaultdict(list)
        self._idle_bytes = self._lent_bytes = self._most_lent_bytes = 0

    def take(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A matrix that nobody uses."""
        idle = self._idle.get((num_rows, width, dtype, device))
        if idle:
            buffer = idle.pop()
            self._idle_bytes -= buffer.nbytes
        else:
            # Training may write where inference was the first to.
            with torch.inference_mode(False):
                buffer = torch.empty(num_rows, width, dtype=dtype, device=device)
        self._lent_bytes += buffer.nbytes
        self._most_lent_bytes = max(self._most_lent_bytes, self._lent_bytes)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Take back a matrix that nothing on its way reads or writes any more."""
        shape = (buffer.shape[0], buffer.shape[1], buffer.dtype, buffer.device)
        idle = self._idle.pop(shape, [])
        self._idle[shape] = [*idle, buffer]
        self._lent_bytes -= buffer.nbytes
        self._idle_bytes += buffer.nbytes
        while self._idle_bytes > _IDLE_RUNS * self._most_lent_bytes:
            oldest = next(iter(self._idle))
            self._idle_bytes -= sum(idle.nbytes for idle in self._idle.pop(oldest))
