"""The keys and values of the requests in a batch, those of this rank's KV heads only.

    keys, values  [rows, K/tp, length, H]    for each layer; row r belongs to the r-th request

A model fills it and reads it through a `RowsAccess` (one new token of each row) or a `PackedAccess` (pieces of several
prompts, one behind the other), which it takes for a transformers Cache. Storage grows in blocks of rows and of tokens
and is given back when the batch is empty. A layer with a sliding window keeps all tokens and masks those too far back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROWS_BLOCK = 4
_TOKENS_BLOCK = 128


@dataclass(frozen=True)
class Piece:
    """Tokens `start:stop` of a prompt, of the request in `row`."""

    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class KVCache:
    """Storage for rows of tokens, made when the first keys and values of a layer come.

    Attributes:
        max_tokens: rows times length up to which rows come in blocks.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_rows = 0
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one request takes on this rank, in all layers; 0 before the first token."""
        stored = (tensor for pair in self.layers.values() for tensor in pair)
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in stored)

    @property
    def num_bytes(self) -> int:
        """Bytes that are held on this rank."""
        return self.bytes_per_token * self.num_rows * self.length

    def reserve(self, num_rows: int, length: int) -> None:
        """Have room for `num_rows` rows of `length` tokens; what was stored stays.

        Storage that grows in one direction gives back what it does not need in the other.
        """
        if num_rows <= self.num_rows and length <= self.length:
            return
        old_rows, old_length = self.num_rows, self.length
        self.num_rows, self.length = _round_up(num_rows, _ROWS_BLOCK), _round_up(length, _TOKENS_BLOCK)
        if self.num_rows * self.length > self.max_tokens:
            self.num_rows = num_rows
        kept_rows, kept_length = min(old_rows, self.num_rows), min(old_length, self.length)
        for index, pair in self.layers.items():
            grown = tuple(self._allocate(tensor) for tensor in pair)
            for new, old in zip(grown, pair, strict=True):
                new[:kept_rows, :, :kept_length] = old[:kept_rows, :, :kept_length]
            self.layers[index] = (grown[0], grown[1])

    def clear(self) -> None:
        """Give all storage back."""
        self.layers.clear()
        self.num_rows = self.length = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` over row `target`."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def wipe(self, row: int) -> None:
        """Forget all of `row`: what is not a number would reach later requests there, through a mask."""
        for pair in self.layers.values():
            for tensor in pair:
                tensor[row].zero_()

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` tokens of two rows."""
        for pair in self.layers.values():
            for tensor in pair:
                kept = tensor[one, :, :length].clone()
                tensor[one, :, :length] = tensor[other, :, :length]
                tensor[other, :, :length] = kept

    def layer(self, index: int, like_key: Tensor, like_value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; heads, width and dtype are those of the first that come."""
        if index not in self.layers:
            self.layers[index] = (self._allocate(like_key), self._allocate(like_value))
        return self.layers[index]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, as a masked key that is not a number would still make its whole row not a number.
        return like.new_zeros((self.num_rows, like.shape[1], self.length, like.shape[3]))


class _Access:
    """What transformers asks of a cache besides `update`."""

    is_compileable = False

    def __init__(self, cache: KVCache, num_keys: int) -> None:
        self.cache = cache
        self.num_keys = num_keys

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row, those of this forward among them."""
        return self.num_keys

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys there will be, and the position of the first."""
        return self.num_keys, 0


class RowsAccess(_Access):
    """Rows `0:B`, each of which gets one token more: `[B, K/tp, 1, H]` in, `[B, K/tp, longest, H]` out."""

    def __init__(self, cache: KVCache, positions: Tensor, longest: int) -> None:
        super().__init__(cache, longest)
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store what is new, and return all; the tail of shorter rows is for the mask to hide."""
        keys, values = self.cache.layer(layer_idx, key, value)
        keys[self._rows, :, self._positions] = key.squeeze(2)
        values[self._rows, :, self._positions] = value.squeeze(2)
        num_rows = len(self._rows)
        return keys[:num_rows, :, : self.num_keys], values[:num_rows, :, : self.num_keys]


class PackedAccess(_Access):
    """Pieces of prompts in one row: `[1, K/tp, S, H]` in; out, for each piece, its prompt up to the end of it."""

    def __init__(self, cache: KVCache, pieces: Sequence[Piece]) -> None:
        super().__init__(cache, sum(piece.stop for piece in pieces))
        self._pieces = tuple(pieces)
        self._lengths = [len(piece) for piece in pieces]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store what is new, and return what the pieces may see."""
        keys, values = self.cache.layer(layer_idx, key, value)
        return self._store(keys, key), self._store(values, value)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        seen = []
        for piece, part in zip(self._pieces, new[0].split(self._lengths, dim=1), strict=True):
            stored[piece.row, :, piece.start : piece.stop] = part
            seen.append(stored[piece.row, :, : piece.stop])
        return (seen[0] if len(seen) == 1 else torch.cat(seen, 1)).unsqueeze(0)


def _round_up(count: int, block: int) -> int:
    return -(-count // block) * block
