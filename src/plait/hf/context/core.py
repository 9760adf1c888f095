"""The core of a Hugging Face model's attention as a module, so that it is replaced as that of our own models is.

transformers lets a config name the function by which every attention of a model lets queries meet keys, and the one
that builds its masks. Under `NAME` the first calls the core that `put_cores` put beside it; the second builds no mask,
but says which window the model means.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from plait.contract.plan import AttentionCore, Role
from plait.errors import ConfigError, ShardingError
from plait.hf.heads import HeadCount
from plait.hf.library import import_library
from plait.parallel.context.core import CausalAttention, build_dropout_error

NAME = "plait"
"""Of our attention in transformers' registries."""

CORE = "attention_core"
"""Under which name an attention module has its core."""

_ADDED = ("softcap", "s_aux", "position_bias")
"""What some models do to scores or their sums, by how they tell it."""


@dataclass(frozen=True)
class Seen:
    """Stands for a mask: a token sees itself and those before it, less than `window` away if that is given."""

    window: int | None


def put_cores(model: nn.Module, heads: Mapping[str, HeadCount]) -> dict[str, Role]:
    """Put a core into every attention module of `model`, one by each path of `heads`; return their roles, by path.

    The model then has a config of its own, which names our attention: others may share the one that it had.
    """
    modeling, masking = import_library("transformers.modeling_utils"), import_library("transformers.masking_utils")
    modeling.AttentionInterface.register(NAME, attend)
    masking.AttentionMaskInterface.register(NAME, describe_mask)
    _give_own_config(model)
    for name in heads:
        attention = model.get_submodule(name)
        attention.add_module(CORE, CausalAttention(find_window(attention, model.config)))
    return {f"{name}.{CORE}": AttentionCore() for name in heads}


def find_window(attention: nn.Module, config: Any) -> int | None:
    """The window of an attention module; None where it has none."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[attention.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it: by the core of `module`.

        query           [B, N, S/cp, H]
        key, value      [B, K, S/cp, H]
        returns         [B, S/cp, N, H]

    Raises:
        ConfigError: it asks for what no attention over a context axis does.
        ShardingError: it means another window than was found in the config.
    """
    core = module._modules.get(CORE)
    window = getattr(core, "window", None)
    told = others.get("sliding_window", window)
    if core is None:
        raise ShardingError(f"{type(module).__name__} is an attention that no plan knows of", hint="leave cp at 1")
    if not (isinstance(attention_mask, Seen) and attention_mask.window == told == window):
        raise ShardingError(
            f"{type(module).__name__}: its model means {attention_mask}, it says a window of {told}, "
            f"and its config {window}",
            hint="leave cp at 1",
        )
    added = next((name for name in _ADDED if others.get(name) is not None), None)
    if added is not None or others.get("is_causal") is False:
        what = f"{added} = {others[added]}" if added else "is_causal = False"
        raise ConfigError(f"{type(module).__name__}: {what} has no form over a context axis, nor within documents")
    if dropout:
        raise build_dropout_error(type(module).__name__, _find_degree(core))
    return core(query, key, value, scale=scaling).transpose(1, 2).contiguous(), None


def describe_mask(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> Seen:
    """What transformers would build a mask for, of which none is built.

    Raises:
        ConfigError: it is not causal, with or without a window: padded, changed by the caller, looking ahead.
    """
    if attention_mask is not None or use_vmap or allow_is_bidirectional_skip:
        what = "padded" if attention_mask is not None else "changed by the model" if use_vmap else "looking ahead"
        raise ConfigError(
            f"attention over a context axis, or within documents, is causal, may have a window; this mask is {what}",
            hint="give whole sequences without an attention_mask, or leave cp at 1",
        )
    return Seen(local_size)


def _find_degree(core: nn.Module) -> int:
    mesh = getattr(core, "mesh", None)
    return 1 if mesh is None else mesh.cp.degree


def _give_own_config(model: nn.Module) -> None:
    shared: Any = model.config
    own = copy.deepcopy(shared)
    own._attn_implementation = NAME
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
