"""Drawing tokens from logits whose vocabulary is cut: every rank draws the same, and no rank ever sees all logits.

    logits_shard  [B, V/tp]    this rank's columns

One all-gather of seven numbers a row settles greedy rows and those that are drawn from all tokens: adding Gumbel noise
to the logits and taking the largest draws from their softmax, and the largest of the shards' largest is the largest.
Rows with a top-k or a top-p take another gather, of candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import Mesh
from plait.contract.parameter import build_vocab_split
from plait.generate.request import SamplingConfig
from plait.generate.sampling.candidates import Filters, iterate_candidates
from plait.generate.sampling.noise import derive_bases, gumbel_noise
from plait.parallel.vocab import VocabShard
from plait.sharding import Interval, build_split


@dataclass(frozen=True)
class Draw:
    """How one row's token is drawn."""

    sampling: SamplingConfig
    position: int
    """Of the token that is drawn, in prompt and continuation."""

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are dropped before one is drawn."""
        return not self.sampling.is_greedy and (self.sampling.top_k > 0 or self.sampling.top_p < 1)


class Sampled(NamedTuple):
    """A token for each row, and its log-probability among all tokens, before temperature and the rest.

    A row whose logits are not finite has a log-probability that is not, and no token that means anything.
    """

    tokens: list[int]
    log_probs: list[float]


class _Statistics(NamedTuple):
    """Numbers of each row `[B]`, float64; of this rank's columns, or of all."""

    largest: Tensor
    id: Tensor
    sum: Tensor
    """Of `exp(logit - largest)`."""
    tempered_sum: Tensor
    """Of `exp((logit - largest) / temperature)`, for rows with a top-p; else 0."""
    score: Tensor
    """The largest of logits with noise, where tokens are drawn from all; else 0."""
    drawn_id: Tensor
    drawn_logit: Tensor


def build_vocab_shard(mesh: Mesh, vocab_size: int) -> VocabShard:
    """The columns of the logits that this rank holds."""
    if mesh.tp.degree == 1:
        return VocabShard(vocab_size, Interval(0, vocab_size), None)
    return VocabShard(vocab_size, build_vocab_split(vocab_size, mesh.tp.degree).intervals[mesh.tp.rank], mesh.tp)


def sample(logits_BV: Tensor, shard: VocabShard, draws: Sequence[Draw]) -> Sampled:
    """Draw a token for each row of this rank's logits `[B, V/tp]`; every rank gets the same."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    bases = derive_bases([(draw.sampling.seed, draw.position) for draw in draws], logits_BV.device)
    whole = _combine(_measure(logits_BV, shard, draws, bases), shard, draws)
    ids, chosen = whole.id, whole.largest
    if any(not draw.sampling.is_greedy for draw in draws):
        is_drawn = torch.tensor([not draw.sampling.is_greedy for draw in draws], device=logits_BV.device)
        ids, chosen = torch.where(is_drawn, whole.drawn_id, ids), torch.where(is_drawn, whole.drawn_logit, chosen)
    if filtered := [row for row, draw in enumerate(draws) if draw.is_filtered]:
        rows = torch.tensor(filtered, device=logits_BV.device)
        filters = Filters.build(
            [draws[row].sampling for row in filtered], shard.size, whole.largest[rows], whole.tempered_sum[rows]
        )
        _draw_filtered(logits_BV[rows], shard, filters, bases[rows], rows, ids, chosen)
    log_probs = chosen - whole.largest - whole.sum.log()
    return Sampled(ids.nan_to_num(0.0).long().tolist(), log_probs.tolist())


def _measure(logits_BV: Tensor, shard: VocabShard, draws: Sequence[Draw], bases: Tensor) -> _Statistics:
    largest, column = logits_BV.max(1)
    sums = (logits_BV - largest.unsqueeze(1)).exp_().sum(1)
    numbers = [largest, column + shard.own.start, sums, *torch.zeros((4, len(draws)), device=largest.device)]
    found = _Statistics(*(number.double() for number in numbers))
    for row, draw in enumerate(draws):
        if draw.is_filtered and draw.sampling.top_p < 1:
            scaled = (logits_BV[row].double() - found.largest[row]) / draw.sampling.temperature
            found.tempered_sum[row] = scaled.exp_().sum()
        elif not draw.is_filtered and not draw.sampling.is_greedy:
            own_ids = torch.arange(shard.own.start, shard.own.stop, device=logits_BV.device)
            noise = gumbel_noise(bases[row : row + 1], own_ids).squeeze(0)
            found.score[row], winner = noise.add_(logits_BV[row].double() / draw.sampling.temperature).max(0)
            found.drawn_id[row], found.drawn_logit[row] = winner + shard.own.start, logits_BV[row, winner]
    return found


def _combine(own: _Statistics, shard: VocabShard, draws: Sequence[Draw]) -> _Statistics:
    """Of this rank's columns -> of all; the first shard wins ties, so that the lowest id does."""
    if shard.axis is None:
        return own
    rows = build_split(shard.axis.degree * len(draws), shard.axis.degree)
    gathered = collectives.all_gather(torch.stack(own, 1), shard.axis, rows, label="sample")
    shards = _Statistics(*gathered.unflatten(0, (shard.axis.degree, len(draws))).unbind(-1))
    largest, likeliest = shards.largest.max(0, keepdim=True)
    score, drawn = shards.score.max(0, keepdim=True)
    below = shards.largest - largest
    temperature = largest.new_tensor([float(draw.sampling.temperature) or 1.0 for draw in draws])
    return _Statistics(
        largest[0],
        shards.id.gather(0, likeliest)[0],
        (shards.sum * below.exp()).sum(0),
        (shards.tempered_sum * (below / temperature).exp()).sum(0),
        score[0],
        shards.drawn_id.gather(0, drawn)[0],
        shards.drawn_logit.gather(0, drawn)[0],
    )


def _draw_filtered(
    logits_RV: Tensor, shard: VocabShard, filters: Filters, bases: Tensor, rows: Tensor, ids: Tensor, chosen: Tensor
) -> None:
    """Draw from what top-k and top-p keep; ids and logits go into place `rows` of `ids` and `chosen`."""
    for found in iterate_candidates(logits_RV, shard, filters):
        noise = gumbel_noise(bases[found.rows], found.ids)
        scores = (found.logits / filters.temperature[found.rows] + noise).masked_fill_(~found.is_kept, float("-inf"))
        winner = scores.argmax(1, keepdim=True)
        ids[rows[found.rows]] = found.ids.gather(1, winner).squeeze(1).double()
        chosen[rows[found.rows]] = found.logits.gather(1, winner).squeeze(1)
