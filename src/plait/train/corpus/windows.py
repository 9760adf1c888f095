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
from plait.parallel.context.sequences import Documents
from plait.parallel.context.tokens import find_documents
from plait.train.corpus.shuffle import permute
from plait.train.corpus.tokens import TokenStream


class Windows:
    """Windows of `seq_len` tokens and the one after them, in an order of their own every epoch.

    Attributes:
        end_of_text: the last token of each document, where attention stays within documents.
    """

    def __init__(self, stream: TokenStream, seq_len: int, seed: int, *, end_of_text: int | None = None) -> None:
        self.num_windows = (len(stream) - 1) // seq_len
        if self.num_windows < 1:
            raise ConfigError(
                f"data: the corpus has {len(stream)} tokens, and one sequence needs {seq_len + 1} (train.seq_len + 1)",
                hint="give more text, or set train.seq_len lower",
            )
        self.seq_len = seq_len
        self.end_of_text = end_of_text
        self._stream = stream
        self._seed = seed

    def read(self, sequence: int) -> NDArray[np.int64]:
        """Tokens `[S + 1]` of the run's sequence number `sequence`."""
        epoch, index = divmod(sequence, self.num_windows)
        start = permute(index, self.num_windows, self._seed, epoch) * self.seq_len
        return self._stream.read(start, start + self.seq_len + 1)


IGNORE_INDEX = -100
"""A target that is not to be predicted."""


@dataclass(frozen=True)
class MicroBatch:
    """What one dp rank takes in one forward and backward."""

    tokens: Tensor
    """`[B, S]`"""
    targets: Tensor
    """`[T]`, the token after each"""
    first_token: int
    """Global index of its first token in the whole run: the key of its dropout masks."""
    documents: Documents = ()
    """Of each row, where attention stays within them."""


def list_first_sequences(run: AnyRun, dp_rank: int) -> range:
    """Of each micro-batch of `dp_rank` in a step the first sequence, counted from the first of the step."""
    size, dp = run.train.micro_batch_size, run.parallel.dp
    return range(dp_rank * size, run.train.gradient_accumulation * dp * size, dp * size)


def read_micro_batches(windows: Windows, run: AnyRun, consumed: int, dp_rank: int) -> Iterator[MicroBatch]:
    """The micro-batches of one step of `dp_rank`, after `consumed` sequences of the run."""
    size = run.train.micro_batch_size
    for first in (consumed + ahead for ahead in list_first_sequences(run, dp_rank)):
        rows = torch.from_numpy(np.stack([windows.read(sequence) for sequence in range(first, first + size)]))
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        documents: Documents = ()
        if windows.end_of_text is not None:
            is_last = tokens == windows.end_of_text
            documents, targets = find_documents_by_end(is_last), targets.masked_fill(is_last, IGNORE_INDEX)
        yield MicroBatch(tokens, targets.flatten(), first * windows.seq_len, documents)


def find_documents_by_end(is_last_BS: Tensor) -> Documents:
    """The documents of each row, by which tokens are the last ones of theirs; no token is in none."""
    return find_documents(is_last_BS.cumsum(1) - is_last_BS.to(torch.int64))
