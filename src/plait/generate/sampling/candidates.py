"""Top-k and top-p over a vocabulary that is cut: as many candidates of each shard as prove which tokens are kept.

    logits_shard  [R, V/tp]    rows that have a top-k or a top-p

Each rank gives its n largest logits, one all-gather puts together n * tp candidates of each row, and every rank finds
the same set in them. The smallest candidate of a shard bounds what that shard has not shown: where the set may reach
below the largest of these bounds, those rows ask again for eight times as many. What is kept is what the warpers of
transformers keep: temperature, then top-k (ties of the last one are kept), then top-p of what top-k left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Axis
from plait.generate.request import SamplingConfig
from plait.parallel.vocab import VocabShard
from plait.sharding import build_split

_FIRST_TOP_P = 64
"""Candidates of a shard in the first round for top-p: most nuclei of language models are smaller."""

_MOST_FIRST = 256
"""Of any: a row with a top-k of thousands asks again by itself, and slows down no other."""

_GROWTH = 8


@dataclass(frozen=True)
class Filters:
    """Top-k and top-p of rows, each `[R, 1]`, with what is known of the whole vocabulary."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    largest: Tensor
    """The largest logit."""
    total: Tensor
    """The sum of `exp((logit - largest) / temperature)`."""

    @classmethod
    def build(cls, samplings: Sequence[SamplingConfig], vocab_size: int, largest_R: Tensor, total_R: Tensor) -> Self:
        """Take the settings of each row; statistics are float64."""
        columns = [[float(each.temperature), min(each.top_k, vocab_size), each.top_p] for each in samplings]
        temperature, top_k, top_p = largest_R.new_tensor(columns).unsqueeze(-1).unbind(1)
        return cls(temperature, top_k.long(), top_p, largest_R.unsqueeze(1), total_R.unsqueeze(1))

    def select(self, rows: Tensor) -> Self:
        """Those of some rows."""
        return type(self)(*(value[rows] for value in vars(self).values()))

    @property
    def first_count(self) -> int:
        """How many candidates of each shard are likely to be enough; one more than k shows whether the last is tied."""
        return int(torch.where(self.top_k > 0, self.top_k + 1, _FIRST_TOP_P).clamp(max=_MOST_FIRST).max())


class Candidates(NamedTuple):
    """Tokens of some rows, the likeliest first and those of equal logits by id, `[rows, n]` each."""

    rows: Tensor
    ids: Tensor
    logits: Tensor
    """float64; -inf where there is no token."""
    is_kept: Tensor


def iterate_candidates(logits_RV: Tensor, shard: VocabShard, filters: Filters) -> Iterator[Candidates]:
    """Yield each row once, when it is known which of its tokens are kept; every rank yields the same."""
    longest = shard.size if shard.axis is None else -(-shard.size // shard.axis.degree)
    rows, count = torch.arange(len(logits_RV), device=logits_RV.device), filters.first_count
    while len(rows):
        count = min(count, longest)
        logits, ids, bound = _gather(logits_RV[rows], shard, count)
        if count == longest:
            bound.fill_(float("-inf"))
        is_kept, is_known = _find_kept(logits, bound, filters.select(rows))
        if count == longest:
            is_known.fill_(True)
        yield Candidates(rows[is_known], ids[is_known], logits[is_known], is_kept[is_known])
        rows, count = rows[~is_known], count * _GROWTH


def _gather(logits_RV: Tensor, shard: VocabShard, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest of each shard of every row, sorted, their ids, and a bound `[R, 1]` on all others."""
    top = logits_RV.topk(min(count, logits_RV.shape[1]), dim=1)
    num_own = top.values.shape[1]
    pairs = logits_RV.new_full((len(logits_RV), count, 2), float("-inf"), dtype=torch.float64)
    pairs[:, :num_own, 0] = top.values
    pairs[:, :, 1] = shard.size
    pairs[:, :num_own, 1] = top.indices + shard.own.start
    values, ids = _all_gather(pairs, shard.axis).unbind(-1)
    bound = values[..., -1].amax(0).unsqueeze(1)
    by_id = ids.transpose(0, 1).flatten(1).sort(dim=1)
    by_value = values.transpose(0, 1).flatten(1).gather(1, by_id.indices).sort(dim=1, descending=True, stable=True)
    return by_value.values, by_id.values.gather(1, by_value.indices).long(), bound


def _find_kept(logits: Tensor, bound: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Which candidates `[R, n]` are kept, and of which rows `[R]` that is certain."""
    has_k = filters.top_k > 0
    last = (filters.top_k - 1).clamp(0, logits.shape[1] - 1)
    threshold = torch.where(has_k, logits.gather(1, last), float("-inf"))
    is_kept = (logits >= threshold) & ~logits.isneginf()
    weights = ((logits - filters.largest) / filters.temperature).exp() * is_kept
    wanted = filters.top_p * torch.where(has_k, weights.sum(1, keepdim=True), filters.total)
    is_before = (weights.cumsum(1) - weights < wanted) | (filters.top_p >= 1)
    certain = (weights * (logits > bound)).sum(1, keepdim=True)
    is_known = torch.where(has_k, threshold > bound, certain >= wanted)
    return is_kept & is_before, is_known.squeeze(1)


def _all_gather(x: Tensor, axis: Axis | None) -> Tensor:
    """`[tp, ...]` of every rank's `x`."""
    if axis is None:
        return x.unsqueeze(0)
    rows = build_split(axis.degree * len(x), axis.degree)
    return collectives.all_gather(x, axis, rows, label="sample").unflatten(0, (axis.degree, len(x)))
