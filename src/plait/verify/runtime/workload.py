"""The step that is verified: a batch, and weights with nothing special about them."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from plait.config.run import AnyRun
from plait.parallel import rng
from plait.parallel.context.sequences import Documents
from plait.sharding import Interval
from plait.train.corpus.windows import IGNORE_INDEX, MicroBatch, find_documents_by_end, list_first_sequences

_IGNORED_EVERY = 5
"""Some targets are ignored, so that a mean over all tokens differs from one over the counted ones."""

_DOCUMENT_TOKENS = 5
"""Of a document in the mean: some end within the parts of a sequence that ranks have, some lie across."""

_SPREAD = 0.25
"""Of biases around 0 and norm weights around 1."""


@dataclass(frozen=True)
class Batch:
    """All sequences of a step: token ids and what is to be predicted at each of them, both `[B, S]`."""

    tokens: Tensor
    targets: Tensor
    first_token: int
    """Index of the first one in the run."""
    documents: Documents = ()
    """Of each sequence, where attention stays within them."""

    def take(self, first: int, size: int) -> MicroBatch:
        """Sequences `first` and after it, `size` of them."""
        rows = slice(first, first + size)
        position = self.first_token + first * self.tokens.shape[1]
        return MicroBatch(self.tokens[rows], self.targets[rows].flatten(), position, self.documents[rows])


def build_batch(config: AnyRun, index: int = 0) -> Batch:
    """Ids drawn from the run's seed, the same in every process, others for each batch.

    It does not begin at the run's first token, which would hide a missing offset.
    """
    draw = torch.Generator().manual_seed(config.seed + index)
    shape = (config.tokens_per_step // config.seq_len, config.seq_len)
    tokens = torch.randint(config.model.vocab_size, shape, generator=draw)
    targets = torch.randint(config.model.vocab_size, (tokens.numel(),), generator=draw)
    targets[_IGNORED_EVERY - 1 :: _IGNORED_EVERY] = IGNORE_INDEX
    documents: Documents = ()
    if config.masks_documents:
        documents = find_documents_by_end(torch.rand(shape, generator=draw) < 1 / _DOCUMENT_TOKENS)
    return Batch(tokens, targets.view(shape), (3 + index) * tokens.numel(), documents)


def list_micro_batches(config: AnyRun, dp_rank: int, index: int = 0) -> Iterator[MicroBatch]:
    """What `dp_rank` takes of a batch, one after the other, as in training."""
    batch, size = build_batch(config, index), config.train.micro_batch_size
    return (batch.take(first, size) for first in list_first_sequences(config, dp_rank))


@torch.no_grad()
def fill_generic_weight(
    part: Tensor, name: str, shape: tuple[int, ...], intervals: tuple[Interval, ...], config: AnyRun
) -> None:
    """Give a part of a parameter values at which no error can hide, representable in the compute dtype and float32.

    Initialisation makes biases zero, norms one and logits nearly constant: a bias added on every rank or attention that
    is wrong would hardly show. Here matrices have rows of about unit length, and biases and norms are spread.
    """
    is_matrix = len(shape) > 1
    mean = 1.0 if not is_matrix and name.endswith(".weight") else 0.0
    std = 1 / sqrt(shape[-1]) if is_matrix else _SPREAD
    rng.normal_(part, rng.derive_key(config.seed, "verify", name), intervals, shape, mean=mean, std=std)
    part.copy_(part.float().to(getattr(torch, config.precision.compute)))
