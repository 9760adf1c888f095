"""Every rank draws the token that one rank draws from the whole logits, whatever the cut of the vocabulary.

A local id, a maximum of one shard only, a normaliser of one shard only or noise by local column would each show as
another token; ties over shards as another id.
"""

import pytest
import torch
from torch import Tensor

from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.generate.request import SamplingConfig
from plait.generate.sampling.sample import Draw, build_vocab_shard, sample
from plait.parallel.vocab import VocabShard
from plait.sharding import Interval, MeshShape

SETTINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=1.0, seed=1),
    SamplingConfig(temperature=0.8, top_k=5, seed=2),
    SamplingConfig(temperature=0.8, top_k=1, seed=2),
    SamplingConfig(temperature=1.3, top_p=0.9, seed=3),
    SamplingConfig(temperature=1.3, top_k=40, top_p=0.5, seed=4),
    SamplingConfig(temperature=3.0, top_p=0.999, seed=5),
    SamplingConfig(temperature=1.0, top_k=10**6, seed=6),
]


def build_logits(vocab: int, seed: int, *, is_tied: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(SETTINGS), vocab)
    return (
        torch.randint(0, 3, shape, generator=generator).float()
        if is_tied
        else 3 * torch.randn(shape, generator=generator)
    )


def run_sample(*, tp: int, vocab: int, is_tied: bool) -> list[list[int]]:
    mesh = build_mesh(MeshShape(tp=tp))
    shard, whole = build_vocab_shard(mesh, vocab), VocabShard(vocab, Interval(0, vocab), None)
    drawn = []
    for seed in range(8):
        logits = build_logits(vocab, seed, is_tied=is_tied)
        draws = [Draw(sampling, 100 * seed + row) for row, sampling in enumerate(SETTINGS)]
        tokens, log_probs = sample(logits[:, shard.own.start : shard.own.stop], shard, draws)
        expected = sample(logits, whole, draws)
        assert tokens == expected.tokens
        torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(expected.log_probs))
        drawn.append(tokens)
    return drawn


@pytest.mark.parametrize("is_tied", [False, True], ids=["all different", "ties"])
@pytest.mark.parametrize("vocab", [5, 331, 2048])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_every_rank_draws_what_one_rank_draws_from_whole_logits(ranks, tp, vocab, is_tied):
    drawn = ranks(tp).call(run_sample, tp=tp, vocab=vocab, is_tied=is_tied)
    assert all(tokens == drawn[0] for tokens in drawn)


def run_counting(*, tp: int, vocab: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    mesh = build_mesh(MeshShape(tp=tp))
    shard = build_vocab_shard(mesh, vocab)
    logits = 4 * build_logits(vocab, 0, is_tied=False)[:, shard.own.start : shard.own.stop]
    moved = []
    for settings in (SETTINGS[:2], SETTINGS[:5]):
        draws = [Draw(sampling, 0) for sampling in settings]
        with record() as trace:
            sample(logits[: len(draws)], shard, draws)
        moved.append([tuple(entry.shape) for entry in trace.collectives])
    return moved[0], moved[1]


def test_what_moves_is_seven_numbers_a_row_and_some_candidates(ranks):
    """The vocabulary of 20,000 never does. Logits are peaked as those of a language model are."""
    for unfiltered, filtered in ranks(2).call(run_counting, tp=2, vocab=20_000):
        assert unfiltered == [(2 * 2, 7)]
        assert filtered[0] == (2 * 5, 7)
        assert filtered[1] == (2 * 3, 64, 2)
        assert all(shape[1] <= 64 * 8 for shape in filtered[2:])
