"""Two views of one model: tokens of prompts are read in sequence-parallel mode, new ones decoded in all-reduce mode.

A step of decoding has one token a request: too few to cut, and nothing to overlap with; reading a prompt has hundreds.
The second view is a skeleton without storage whose parameters and buffers are replaced by those of the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from plait.errors import ConfigError
from plait.generate.cache import KVCache, PackedAccess, Piece, RowsAccess
from plait.generate.masks import MaskForm


@dataclass(frozen=True)
class Views:
    """What runs the two kinds of forward pass; one model for both where there is one rank."""

    reading: nn.Module
    decoding: nn.Module
    mask_form: MaskForm
    device: torch.device
    dtype: torch.dtype

    def read(self, cache: KVCache, prompts: Sequence[Sequence[int]], pieces: Sequence[Piece]) -> Tensor:
        """Put pieces of prompts into the cache; logits `[pieces, V/tp]` of what follows the last token of each."""
        lengths = [len(piece) for piece in pieces]
        seen = [piece.stop for piece in pieces]
        read = (prompt[piece.start : piece.stop] for prompt, piece in zip(prompts, pieces, strict=True))
        positions = torch.cat([torch.arange(piece.start, piece.stop, device=self.device) for piece in pieces])
        keys = torch.cat([torch.arange(stop, device=self.device) for stop in seen])
        which = torch.arange(len(pieces), device=self.device)
        of_query, of_key = (which.repeat_interleave(self._tensor(counts)) for counts in (lengths, seen))
        distance = (positions.unsqueeze(1) - keys).unsqueeze(0)
        is_visible = (of_query.unsqueeze(1) == of_key).unsqueeze(0) & (distance >= 0)
        output = self.reading(
            input_ids=self._tensor(list(chain.from_iterable(read))).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=self.mask_form.build(is_visible, distance, self.dtype),
            cache=PackedAccess(cache, pieces),
            use_cache=True,
            logits_to_keep=self._tensor(lengths).cumsum(0) - 1,
        )
        logits: Tensor = output.logits[0]
        return logits

    def decode(self, cache: KVCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Put the newest token of rows `0:B` into the cache; logits `[B, V/tp]` of what follows it."""
        places = self._tensor(positions)
        longest = max(positions) + 1
        distance = places.view(-1, 1, 1) - torch.arange(longest, device=self.device)
        output = self.decoding(
            input_ids=self._tensor(tokens).unsqueeze(1),
            position_ids=places.unsqueeze(1),
            attention_mask=self.mask_form.build(distance >= 0, distance, self.dtype),
            cache=RowsAccess(cache, places, longest),
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def share_tensors(model: nn.Module, skeleton: nn.Module) -> None:
    """Replace every parameter and buffer of `skeleton` by that of the same name in `model`.

    Raises:
        ConfigError: the two do not have the same.
    """
    for list_names, kind in ((nn.Module.named_parameters, "parameters"), (nn.Module.named_buffers, "buffers")):
        found = {name: tuple(value.shape) for name, value in list_names(model, remove_duplicate=False)}
        wanted = {name: tuple(value.shape) for name, value in list_names(skeleton, remove_duplicate=False)}
        if found != wanted:
            differing = sorted(set(found.items()) ^ set(wanted.items()))
            raise ConfigError(f"views: {kind} of the two views differ: {', '.join(map(str, differing))}")
    for name, module in skeleton.named_modules(remove_duplicate=False):
        twin = model.get_submodule(name)
        for key in list(module._parameters):
            module._parameters[key] = twin._parameters[key]
        for key in list(module._buffers):
            module._buffers[key] = twin._buffers[key]
