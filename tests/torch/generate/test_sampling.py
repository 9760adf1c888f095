"""Drawing tokens on one rank: what is kept is what transformers keeps, what is drawn has the right frequencies."""

from collections import Counter
from math import isfinite

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from plait.generate.request import SamplingConfig
from plait.generate.sampling.candidates import Filters, iterate_candidates
from plait.generate.sampling.sample import Draw, sample
from plait.parallel.vocab import VocabShard
from plait.sharding import Interval

CHI_SQUARE_999 = {7: 24.3, 4: 18.5}
"""Quantile 0.999 by degrees of freedom; seeds are fixed, so that this is no matter of luck."""


def whole(vocab: int) -> VocabShard:
    return VocabShard(vocab, Interval(0, vocab), None)


def build_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def find_kept(logits: Tensor, samplings: list[SamplingConfig]) -> list[set[int]]:
    """The tokens of each row that may be drawn."""
    exact = logits.double()
    largest = exact.max(1).values
    temperature = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64)
    totals = ((exact - largest[:, None]) / temperature[:, None]).exp().sum(1)
    kept: dict[int, set[int]] = {}
    filters = Filters.build(samplings, logits.shape[1], largest, totals)
    for found in iterate_candidates(logits, whole(logits.shape[1]), filters):
        for index, row in enumerate(found.rows.tolist()):
            kept[row] = set(found.ids[index][found.is_kept[index]].tolist())
    return [kept[row] for row in range(len(logits))]


def find_warped(logits: Tensor, sampling: SamplingConfig) -> set[int]:
    """The same by transformers."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return set((scores[0] > float("-inf")).nonzero().flatten().tolist())


FILTERED = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 500]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99]),
)


@given(st.lists(FILTERED, min_size=1, max_size=4), st.integers(0, 10**6), st.sampled_from([5, 63, 64, 65, 300]))
def test_what_is_kept_is_what_transformers_keeps(samplings: list[SamplingConfig], seed: int, vocab: int) -> None:
    logits = build_logits(len(samplings), vocab, seed)
    expected = [find_warped(logits[row : row + 1].double(), sampling) for row, sampling in enumerate(samplings)]
    assert find_kept(logits, samplings) == expected


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_ties_of_the_last_of_top_k_are_kept(top_k: int, seed: int) -> None:
    logits = torch.randint(0, 4, (1, 30), generator=torch.Generator().manual_seed(seed)).float()
    sampling = SamplingConfig(temperature=0.7, top_k=top_k)
    assert find_kept(logits, [sampling]) == [find_warped(logits, sampling)]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_a_nucleus_of_equal_logits_has_the_lowest_ids(top_p: float) -> None:
    """More candidates are asked for until no unseen one can be equal to a seen one."""
    kept = find_kept(torch.zeros(1, 1000), [SamplingConfig(temperature=1.0, top_p=top_p)])
    assert kept == [set(range(round(1000 * top_p)))]


def draw_many(logits_V: Tensor, count: int, **settings: float) -> Counter[int]:
    logits = logits_V.expand(count, -1)
    draws = [Draw(SamplingConfig(seed=7, **settings), position) for position in range(count)]
    return Counter(sample(logits, whole(len(logits_V)), draws).tokens)


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 1.7}, {"temperature": 1.0, "top_k": 8}])
def test_frequencies_are_those_of_the_softmax(settings: dict[str, float]) -> None:
    count, logits = 20_000, torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 0.0, 1.5])
    expected = count * (logits.double() / settings["temperature"]).softmax(0)
    drawn = draw_many(logits, count, **settings)
    chi_square = sum((drawn[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(8))
    assert chi_square < CHI_SQUARE_999[7]


def test_frequencies_within_a_nucleus_are_those_of_the_softmax_of_it() -> None:
    count, logits = 20_000, torch.tensor([0.0, 1.0, -9.0, 0.5, 2.0, -8.0, -9.0, 1.5])
    kept = [4, 7, 1, 3, 0]
    expected = count * logits[kept].double().softmax(0)
    drawn = draw_many(logits, count, temperature=1.0, top_p=0.99)
    assert set(drawn) == set(kept)
    numbers = zip((drawn[token] for token in kept), expected.tolist(), strict=True)
    assert sum((found - wanted) ** 2 / wanted for found, wanted in numbers) < CHI_SQUARE_999[4]


def test_greedy_takes_the_lowest_of_equal_ids_and_tells_its_log_probability() -> None:
    logits = build_logits(3, 50)
    logits[1, [7, 30]] = 20.0
    tokens, log_probs = sample(logits, whole(50), [Draw(SamplingConfig(), 3)] * 3)
    assert tokens == logits.argmax(1).tolist()
    assert tokens[1] == 7
    expected = logits.double().log_softmax(1)[range(3), tokens]
    torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), expected)


SETTINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=1.0, seed=1),
    SamplingConfig(temperature=0.8, top_k=5, seed=2),
    SamplingConfig(temperature=1.3, top_p=0.9, seed=3),
    SamplingConfig(temperature=1.3, top_k=20, top_p=0.5, seed=3),
]


def test_a_token_does_not_depend_on_what_else_is_in_the_batch() -> None:
    logits = build_logits(len(SETTINGS), 400)
    draws = [Draw(sampling, 11 + row) for row, sampling in enumerate(SETTINGS)]
    together = sample(logits, whole(400), draws)
    for row, draw in enumerate(draws):
        alone = sample(logits[row : row + 1], whole(400), [draw])
        assert (alone.tokens[0], alone.log_probs[0]) == (together.tokens[row], together.log_probs[row])
    order = [3, 0, 4, 2, 1]
    assert sample(logits[order], whole(400), [draws[row] for row in order]).tokens == [
        together.tokens[row] for row in order
    ]


def test_seed_and_position_change_what_is_drawn_and_nothing_else_does() -> None:
    logits = torch.zeros(1, 5000)

    def draw(seed: int, position: int) -> int:
        return sample(logits, whole(5000), [Draw(SamplingConfig(temperature=1.0, seed=seed), position)]).tokens[0]

    assert draw(0, 5) == draw(0, 5)
    assert len({draw(0, position) for position in range(20)} | {draw(seed, 0) for seed in range(1, 20)}) > 30


def test_a_drawn_token_has_its_log_probability_before_temperature_and_filters() -> None:
    logits = build_logits(1, 100)
    tokens, log_probs = sample(logits, whole(100), [Draw(SamplingConfig(temperature=2.0, top_k=3), 0)])
    assert log_probs[0] == pytest.approx(float(logits.log_softmax(1)[0, tokens[0]]), abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_their_row_alone(value: float) -> None:
    logits = build_logits(2, 10)
    logits[1, 3] = value
    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0), SamplingConfig(temperature=1.0, top_k=3)):
        log_probs = sample(logits, whole(10), [Draw(sampling, 0)] * 2).log_probs
        assert [isfinite(log_prob) for log_prob in log_probs] == [True, False]


def test_half_precision_logits_are_compared_as_they_are() -> None:
    logits = build_logits(4, 1000).bfloat16()
    draws = [Draw(SamplingConfig(temperature=1.0, top_p=0.9, seed=row), 0) for row in range(4)]
    assert sample(logits, whole(1000), draws) == sample(logits.float(), whole(1000), draws)


def test_a_top_k_of_thousands_beside_others_keeps_what_it_should() -> None:
    logits = build_logits(3, 5000)
    samplings = [SamplingConfig(temperature=1.0, top_k=top_k) for top_k in (3, 2500, 40)]
    assert [len(kept) for kept in find_kept(logits, samplings)] == [3, 2500, 40]


def test_a_top_k_beyond_the_vocabulary_keeps_all() -> None:
    logits = torch.linspace(0, 3, 50)[None]
    for top_k in (50, 2**63, 10**400):
        assert find_kept(logits, [SamplingConfig(temperature=1.0, top_k=top_k)]) == [set(range(50))]
