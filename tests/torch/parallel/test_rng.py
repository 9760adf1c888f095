"""Random numbers keyed by global element index: a reference for the hash, the bits of every cut, and the statistics."""

from math import cos, erf, log, pi, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import ShardingError
from plait.parallel import rng
from plait.sharding import Interval

NUM_SAMPLES = 1 << 20
KS_BOUND = 2.0
"""sqrt(n) times the Kolmogorov-Smirnov distance is above this for 1 seed in 1500; the seeds here are fixed."""
SIGMAS = 4.0
"""Bound on estimates, in units of their own standard deviation."""


def whole(*shape: int) -> list[Interval]:
    return [Interval(0, size) for size in shape]


def part_of(tensor: Tensor, intervals: list[Interval]) -> Tensor:
    return tensor[tuple(slice(interval.start, interval.stop) for interval in intervals)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[Interval]]:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    edges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, [Interval(start, stop) for start, stop in edges]


@given(cuts(), st.integers(1, 40))
def test_every_cut_sees_its_part_of_one_tensor_bitwise(cut, chunk_elements):
    """FIELD 3.14, 3.15: a function of the global index, never of the shard."""
    shape, intervals = cut
    local_shape = [len(interval) for interval in intervals]
    full = rng.normal_(torch.empty(shape, dtype=torch.float64), 7, whole(*shape), shape)
    full_mask = rng.bernoulli_mask(7, whole(*shape), shape, 0.5, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "CHUNK_ELEMENTS", chunk_elements)
        part = rng.normal_(torch.empty(local_shape, dtype=torch.float64), 7, intervals, shape)
        mask = rng.bernoulli_mask(7, intervals, shape, 0.5, device="cpu")
    assert torch.equal(part, part_of(full, intervals))
    assert torch.equal(mask, part_of(full_mask, intervals))


def hash_with_integers(index: int, key: int) -> int:
    modulus = 1 << 64
    word = (index * 0x9E3779B97F4A7C15 + key) % modulus
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % modulus
    word ^= key
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % modulus
    return word ^ (word >> 31)


@given(st.integers(0, 2**50), st.integers(0, 2**64 - 1))
def test_hash_is_arithmetic_modulo_2_to_64(index, key):
    word = rng.hash_index_(torch.tensor([index]), key)
    assert word.item() % (1 << 64) == hash_with_integers(index, key)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3), st.integers(0, 999))
def test_numbers_are_box_muller_of_the_two_halves_of_a_word(keys, index):
    for key in keys:
        word = hash_with_integers(index, key)
        radius = sqrt(-2 * log(((word >> 32) + 0.5) / 2**32))
        expected = 3 + 2 * radius * cos(2 * pi * (word % 2**32) / 2**32)
        drawn = rng.normal_(
            torch.empty(1, dtype=torch.float64), key, [Interval(index, index + 1)], (1000,), mean=3, std=2
        )
        assert drawn.item() == pytest.approx(expected, abs=1e-9)


def test_bits_never_change():
    """A checkpoint's run is resumed with the masks it would have had: these values are a file format."""
    assert rng.derive_key(0, "init", "embedding.weight") == 0x2246F22723B34967
    drawn = rng.normal_(torch.empty(3, dtype=torch.float64), 1, whole(3), (3,))
    assert [value.hex() for value in drawn.tolist()] == [
        "0x1.9e0bc1a3b391bp-2",
        "0x1.e565a2319d77ap+0",
        "-0x1.8cce24e628566p-1",
    ]
    assert rng.bernoulli_mask(1, whole(8), (8,), 0.5, device="cpu").int().tolist() == [0, 1, 1, 0, 0, 0, 1, 1]


def test_keys_tell_seeds_purposes_and_names_apart():
    parts = [(0,), (1,), (0, "a"), (0, "a", "b"), (0, "ab"), (0, "a", "b", ""), (0, 1), (0, "1"), (-1,)]
    assert len({rng.derive_key(*part) for part in parts}) == len(parts)


def distance_from(values: Tensor, distribution: Tensor) -> float:
    """sqrt(n) times the largest distance of the empirical from the true distribution function (Kolmogorov-Smirnov)."""
    steps = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    return sqrt(len(values)) * max(
        (distribution - steps).abs().max().item(), (distribution - steps + 1 / len(values)).abs().max().item()
    )


@pytest.mark.parametrize("key", [0, 1, 2**63, rng.derive_key(3, "init", "head.weight")])
def test_normal_numbers_are_normal(key):
    x = rng.normal_(torch.empty(NUM_SAMPLES, dtype=torch.float64), key, whole(NUM_SAMPLES), (NUM_SAMPLES,))
    assert abs(x.mean().item()) < SIGMAS / sqrt(NUM_SAMPLES)
    assert abs(x.var().item() - 1) < SIGMAS * sqrt(2 / NUM_SAMPLES)
    assert abs((x**4).mean().item() - 3) < SIGMAS * sqrt(96 / NUM_SAMPLES)
    ordered = x.sort().values
    assert distance_from(ordered, (1 + torch.erf(ordered / sqrt(2))) / 2) < KS_BOUND
    beyond = (x.abs() > 4).sum().item()
    expected = NUM_SAMPLES * (1 - erf(4 / sqrt(2)))
    assert abs(beyond - expected) < SIGMAS * sqrt(expected)


def test_uniform_numbers_are_uniform_and_inside():
    x = rng.uniform_(
        torch.empty(NUM_SAMPLES, dtype=torch.float64), 5, whole(NUM_SAMPLES), (NUM_SAMPLES,), low=2, high=4
    )
    assert 2 < x.min().item() < x.max().item() < 4
    ordered = x.sort().values
    assert distance_from(ordered, (ordered - 2) / 2) < KS_BOUND


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_mask_is_true_with_its_probability(probability):
    mask = rng.bernoulli_mask(9, whole(NUM_SAMPLES), (NUM_SAMPLES,), probability, device="cpu").double()
    deviation = sqrt(probability * (1 - probability) / NUM_SAMPLES)
    assert abs(mask.mean().item() - probability) < SIGMAS * deviation


def test_mask_at_the_ends():
    assert rng.bernoulli_mask(9, whole(1000), (1000,), 1.0, device="cpu").all()
    assert not rng.bernoulli_mask(9, whole(1000), (1000,), 0.0, device="cpu").any()


@pytest.mark.parametrize("lag", [1, 2, 64, 1024])
def test_neighbours_are_uncorrelated(lag):
    x = rng.normal_(torch.empty(NUM_SAMPLES, dtype=torch.float64), 11, whole(NUM_SAMPLES), (NUM_SAMPLES,))
    assert abs((x[lag:] * x[:-lag]).mean().item()) < SIGMAS / sqrt(NUM_SAMPLES - lag)


@pytest.mark.parametrize("other", [12 + 1, 12 ^ (1 << 40), (12 + 0x9E3779B97F4A7C15) % 2**64])
def test_keys_give_uncorrelated_numbers(other):
    """The last key would repeat the stream one element later, were the key only added."""
    x, y = (
        rng.normal_(torch.empty(NUM_SAMPLES, dtype=torch.float64), key, whole(NUM_SAMPLES), (NUM_SAMPLES,))
        for key in (12, other)
    )
    for one, two in ((x, y), (x[1:], y[:-1]), (x[:-1], y[1:])):
        assert abs((one * two).mean().item()) < SIGMAS / sqrt(len(one))


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and not any(out is arg for arg in args):
            self.num_bytes = max(self.num_bytes, out.nbytes)
        return out


@pytest.mark.parametrize("intervals", [whole(64, 1024), [Interval(0, 64), Interval(512, 1536)]])
def test_temporaries_do_not_grow_with_the_tensor(monkeypatch, intervals):
    monkeypatch.setattr(rng, "CHUNK_ELEMENTS", 256)
    target = torch.empty([len(interval) for interval in intervals])
    with LargestTensor() as largest:
        rng.normal_(target, 1, intervals, (64, 2048))
    assert largest.num_bytes <= 256 * 8


def test_a_tensor_that_is_not_the_part_is_refused():
    with pytest.raises(ShardingError, match=r"\[3, 4\] is not the part \[3, 5\] of \[6, 5\]"):
        rng.normal_(torch.empty(3, 4), 1, [Interval(0, 3), Interval(0, 5)], (6, 5))
