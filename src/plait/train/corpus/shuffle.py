"""A permutation that is computed index by index, so that nothing but a position has to be kept or saved."""

from functools import lru_cache
from hashlib import blake2b

_ROUNDS = 4
_MASK = (1 << 64) - 1


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Where `index` of 0..size-1 goes in the order of this seed and epoch.

    A Feistel network is a bijection of the numbers of an even number of bits; walking its cycle until it comes back
    below `size` makes it one of 0..size-1 (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). At most
    four times as many numbers as indices, so four steps of the walk on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        index = _encipher(index, half_bits, _derive_keys(seed, epoch))
        if index < size:
            return index


@lru_cache(maxsize=8)
def _derive_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


def _encipher(index: int, half_bits: int, keys: tuple[int, ...]) -> int:
    low = (1 << half_bits) - 1
    left, right = index >> half_bits, index & low
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low)
    return left << half_bits | right


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit flips every output bit half the time."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
