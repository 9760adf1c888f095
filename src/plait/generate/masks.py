"""Which cached tokens each new token attends to, in the form a Hugging Face model takes: one mask, or one per kind."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError

_KINDS = ("full_attention", "sliding_attention")

Masks = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class MaskForm:
    """The masks of one model.

    Masks are `[B, 1, S, keys]` and always explicit: rows of different lengths and packed prompts look like nothing a
    model would make by itself.
    """

    windows: dict[str, int | None]
    """For each kind of layer how many tokens back it sees, its own included; None for all."""
    is_additive: bool
    """Whether masks are added to the scores (eager attention), or say true where a token is seen (sdpa)."""

    def build(self, is_visible: Tensor, distance: Tensor, dtype: torch.dtype) -> Masks:
        """Make masks from what may be seen at all, and how far back it is, both `[B, S, keys]`."""
        masks = {kind: self._build_one(is_visible, distance, window, dtype) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _build_one(self, is_visible: Tensor, distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
        is_seen = is_visible if window is None else is_visible & (distance < window)
        mask = is_seen.unsqueeze(1)
        if not self.is_additive:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def derive_mask_form(config: Any) -> MaskForm:
    """Read from a transformers config what its model takes, as its own `create_masks_for_generate` reads it.

    Raises:
        ConfigError: layers of another kind than full and sliding attention, or an attention that takes no masks.
    """
    name = type(config).__name__
    implementation = config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise ConfigError(
            f"generate: {name} asks for attention {implementation!r}, which takes no explicit masks",
            hint='load the model with attn_implementation="sdpa" or "eager"',
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"]
        if getattr(config, "attention_chunk_size", None) is not None:
            kinds = ["chunked_attention"]
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise ConfigError(f"generate: {name} has layers of kind {', '.join(unknown)}, of which no cache is known")
    windows = {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}
    return MaskForm(windows, is_additive=implementation == "eager")
