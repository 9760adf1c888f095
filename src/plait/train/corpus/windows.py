"""Sequences in a shuffled order that one number describes: how many were consumed.

Sequence `i` of a run is the same whatever the dp degree, the micro-batch and the accumulation are; these only say
which rank takes it when. So a run resumes exactly from that number, on any mesh.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.config.run import AnyRun
from plait.errors import ConfigError
from plait.train.corpus.shuffle import permute
from plait.train.corpus.tokens import TokenStream


class Windows:
    """Windows of `seq_len` tokens and the one after them, in an order of their own every epoch."""

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        self.num_windows = (len(stream) - 1) // seq_len
        if self.num_windows < 1:
            raise ConfigError(
                f"data: the corpus has {len(stream)} tokens, and one sequence needs {seq_len + 1} (train.seq_len + 1)",
                hint="give more text, or set train.seq_len lower",
            )
        self.seq_len = seq_len
        self._stream = stream
        self._seed = seed

    def read(self, sequence: int) -> NDArray[np.int64]:
        """Tokens `[S + 1]` of the run's sequence number `sequence`."""
        epoch, index = divmod(sequence, self.num_windows)
        start = permute(index, self.num_windows, self._seed, epoch) * self.seq_len
        return self._stream.read(start, start + self.seq_len + 1)


@dataclass(frozen=True)
class MicroBatch:
    """What one dp rank takes in one forward and backward."""

    tokens: Tensor
    """`[B, S]`"""
    targets: Tensor
    """`[T]`, the token after each"""
    first_token: int
    """Global index of its first token in the whole run: the key of its dropout masks."""


def list_first_sequences(run: AnyRun, dp_rank: int) -> list[int]:
    """Of each micro-batch of `dp_rank` in a step the first sequence, counted from the first of the step."""
    size, dp = run.train.micro_batch_size, run.parallel.dp
    return [(accumulated * dp + dp_rank) * size for accumulated in range(run.train.gradient_accumulation)]


def read_micro_batches(windows: Windows, run: AnyRun, consumed: int, dp_rank: int) -> Iterator[MicroBatch]:
    """The micro-batches of one step of `dp_rank`, after `consumed` sequences of the run."""
    size = run.train.micro_batch_size
    for first in (consumed + ahead for ahead in list_first_sequences(run, dp_rank)):
        rows = torch.from_numpy(np.stack([windows.read(sequence) for sequence in range(first, first + size)]))
        yield MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].flatten(), first * windows.seq_len)
