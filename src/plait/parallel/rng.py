"""Random numbers as a function of (key, global element index): bitwise the same for every tp degree, cut and device.

A 64-bit counter-based hash (the finaliser of SplitMix64, Steele et al. 2014, with the key added before and xored
between its two multiplications) gives one word per element. Everything after it uses only operations that IEEE 754
rounds correctly (add, multiply, divide, square root) or integer ones: a library `log` or `cos` may round differently in
the vector body of a loop and in its tail, and then the bits would depend on where a tensor was cut.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import factorial, log, pi, prod

import torch
from torch import Tensor

from plait.errors import ShardingError
from plait.sharding import Interval

CHUNK_ELEMENTS = 1 << 17
"""Elements drawn at a time: about five 8-byte temporaries of this size, whatever the tensor's."""


def derive_key(seed: int, *parts: str | int) -> int:
    """Hash `seed` and `parts` (a purpose, a parameter's name) to a 64-bit key."""
    return int.from_bytes(blake2b(repr((seed, *parts)).encode(), digest_size=8).digest(), "little")


@torch.no_grad()
def uniform_(
    tensor: Tensor,
    key: int,
    intervals: Sequence[Interval],
    global_shape: Sequence[int],
    *,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Fill the part `intervals` of a tensor of `global_shape` with uniform numbers between `low` and `high`."""
    for part, index in _iterate_chunks(tensor, intervals, global_shape):
        word = hash_index_(index, key)
        unit = ((word >> 12) & _low_bits(52)).double().add_(0.5).mul_(2.0**-52)
        part.copy_(unit.mul_(high - low).add_(low))
    return tensor


@torch.no_grad()
def normal_(
    tensor: Tensor,
    key: int,
    intervals: Sequence[Interval],
    global_shape: Sequence[int],
    *,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Fill the part `intervals` of a tensor of `global_shape` with normal numbers.

    Box-Muller in float64 on the two halves of each word; magnitudes end at 6.7 standard deviations, beyond which one
    element in 4e10 would lie.
    """
    for part, index in _iterate_chunks(tensor, intervals, global_shape):
        word = hash_index_(index, key)
        radius = _negative_log((word >> 32) & _low_bits(32)).mul_(2).sqrt_()
        part.copy_(radius.mul_(_cosine_of_turns(word & _low_bits(32))).mul_(std).add_(mean))
    return tensor


@torch.no_grad()
def fraction_(tensor: Tensor, key: int, intervals: Sequence[Interval], global_shape: Sequence[int]) -> Tensor:
    """Fill the part `intervals` of a float32 tensor of `global_shape` with multiples of `2**-24` from 0 to below 1."""
    for part, index in _iterate_chunks(tensor, intervals, global_shape):
        word = hash_index_(index, key)
        part.copy_(((word >> 40) & _low_bits(24)).float().mul_(2.0**-24))
    return tensor


@torch.no_grad()
def bernoulli_mask(
    key: int,
    intervals: Sequence[Interval],
    global_shape: Sequence[int],
    probability: float,
    *,
    device: torch.device | str,
) -> Tensor:
    """Draw the part `intervals` of a bool mask of `global_shape`, each element true with `probability`."""
    mask = torch.empty([len(interval) for interval in intervals], dtype=torch.bool, device=device)
    threshold = round(probability * 2**63)
    for part, index in _iterate_chunks(mask, intervals, global_shape):
        word = (hash_index_(index, key) >> 1) & _low_bits(63)
        part.copy_(word < threshold if threshold < 2**63 else torch.ones_like(part))
    return mask


def hash_index_(index: Tensor, key: int) -> Tensor:
    """Replace int64 indices by 64-bit words that look random; int64 arithmetic wraps, so all is modulo 2^64."""
    word = index.mul_(_signed(_GAMMA)).add_(_signed(key))
    word ^= (word >> 30) & _low_bits(34)
    word *= _signed(_MIX_1)
    word ^= _signed(key)
    word ^= (word >> 27) & _low_bits(37)
    word *= _signed(_MIX_2)
    word ^= (word >> 31) & _low_bits(33)
    return word


_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

_LOG_TERMS = tuple(2 / power for power in (1, 3, 5, 7, 9, 11, 13))
_COSINE_TERMS = tuple(-((-1) ** k) * (2 * pi) ** (2 * k + 1) / factorial(2 * k + 1) for k in range(9))


def _low_bits(count: int) -> int:
    return (1 << count) - 1


def _signed(word: int) -> int:
    word &= _low_bits(64)
    return word - (1 << 64) if word >> 63 else word


def _negative_log(bits: Tensor) -> Tensor:
    """`-ln((bits + 1/2) / 2^32)` for 32-bit integers, by the series of atanh around sqrt(1/2); off by 2e-12."""
    mantissa, exponent = torch.frexp(bits.double().add_(0.5))
    ratio = (mantissa - 0.5**0.5).div_(mantissa.add_(0.5**0.5))
    series = _odd_polynomial(ratio, _LOG_TERMS)
    return (32.5 - exponent).double().mul_(log(2)).sub_(series)


def _cosine_of_turns(bits: Tensor) -> Tensor:
    """`cos(2*pi * bits / 2^32)` for 32-bit integers, by the series of the sine on a quarter turn; off by 4e-14."""
    quarter = bits.double().mul_(2.0**-32).sub_(0.5).abs_().neg_().add_(0.25)
    return _odd_polynomial(quarter, _COSINE_TERMS)


def _odd_polynomial(x: Tensor, terms: Sequence[float]) -> Tensor:
    """`terms[0]*x + terms[1]*x^3 + ...` by Horner's rule, multiplication and addition rounded apart."""
    square = x * x
    value = torch.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        value.mul_(square).add_(term)
    return value.mul_(x)


def _iterate_chunks(
    tensor: Tensor, intervals: Sequence[Interval], global_shape: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of `tensor` with the global linear index of each of their elements.

    Everything from the last cut dim on is one run of consecutive indices; the dims before it only say where runs begin.
    """
    lengths = [len(interval) for interval in intervals]
    if list(tensor.shape) != lengths or len(lengths) != len(global_shape):
        raise ShardingError(f"a tensor {list(tensor.shape)} is not the part {lengths} of {list(global_shape)}")
    if not tensor.numel():
        return
    cut = [dim for dim, length in enumerate(lengths) if length != global_shape[dim] or intervals[dim].start]
    last = cut[-1] if cut else 0
    run = prod(lengths[last:])
    begins = _derive_run_begins(intervals, global_shape, last, tensor.device)
    flat = tensor.view(-1, run)
    num_columns = min(run, CHUNK_ELEMENTS)
    num_rows = CHUNK_ELEMENTS // num_columns
    for row_begins, rows in zip(begins.split(num_rows), flat.split(num_rows), strict=True):
        for column in range(0, run, num_columns):
            part = rows[:, column : column + num_columns]
            steps = torch.arange(column, column + part.shape[1], device=tensor.device)
            yield part, row_begins.unsqueeze(1) + steps


def _derive_run_begins(
    intervals: Sequence[Interval], global_shape: Sequence[int], last: int, device: torch.device
) -> Tensor:
    """Global linear index of the first element of each run, in order."""
    begins = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(last):
        coordinates = torch.arange(intervals[dim].start, intervals[dim].stop, device=device)
        begins = (begins.unsqueeze(1) * global_shape[dim] + coordinates).flatten()
    inner = prod(global_shape[last + 1 :])
    return begins.mul_(global_shape[last]).add_(intervals[last].start).mul_(inner)
