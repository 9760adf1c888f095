"""What keeps the attention of a Hugging Face model from being cut over context ranks, known before anything starts."""

from collections.abc import Iterator
from inspect import signature
from typing import Any

from torch import nn

from plait.errors import ConfigError
from plait.hf.finding import generic
from plait.hf.plan import ModelPlan

_KINDS = ("full_attention", "sliding_attention")
"""Of layers, as configs name them."""

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary angles that depend on the largest position in sight, which each rank has another of."""

_FLAGS = {
    "attn_logit_softcapping": "squashes scores, for which there is no merging of blocks here",
    "alibi": "adds the distance of positions to scores",
    "use_alibi": "adds the distance of positions to scores",
}
"""Fields of a config that change scores, and what they do."""

_RATES = ("attention_dropout", "attn_pdrop", "attn_dropout")
"""Of dropout of probabilities, as attributes of an attention module."""


def check_attention(model: nn.Module, plan: ModelPlan, degree: int) -> None:
    """Refuse a model whose attention cannot be cut over `degree` context ranks, or on one be kept within documents.

    Raises:
        ConfigError: lists all that it does beside causal attention, with or without a window, through transformers'
            interface.
    """
    problems = list(dict.fromkeys(_list_problems(model, plan)))
    if problems:
        where = f"over {degree} context ranks" if degree > 1 else "within documents"
        hint = "leave parallel.cp at 1" if degree > 1 else "leave out data.mask_documents"
        raise ConfigError.from_problems(f"{type(model).__name__} {where}", problems, hint=hint)


def _list_problems(model: Any, plan: ModelPlan) -> Iterator[str]:
    config = model.config
    if not plan.heads:
        yield "no module of it is known as attention"
    base = model.get_submodule(plan.base)
    if "position_ids" not in signature(base.forward).parameters:
        yield f"{plan.base} ({type(base).__name__}) is not told of positions"
    if not model._can_set_attn_implementation():
        yield "its attention does not go through transformers' attention interface"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        yield "its tokens see those behind them"
    for name, what in _FLAGS.items():
        if getattr(config, name, None):
            yield f"{name} = {getattr(config, name)}: {what}"
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _KINDS]
    if kinds:
        yield f"layers of the kind {kinds[0]}: those that can be cut are {' and '.join(_KINDS)}"
    for name, module in model.named_modules():
        yield from _list_rope_problems(module)
        if name in plan.heads:
            yield from _list_module_problems(generic(name), module)


def _list_rope_problems(module: nn.Module) -> Iterator[str]:
    found = vars(module).get("rope_type")
    for kind in found.values() if isinstance(found, dict) else (found,):
        if any(isinstance(kind, str) and name in kind for name in _BY_LENGTH):
            yield f"rope_type = {kind!r}: its angles depend on the largest position, which is another one on each rank"


def _list_module_problems(name: str, attention: nn.Module) -> Iterator[str]:
    if not getattr(attention, "is_causal", True):
        yield f"{name}: its tokens see those behind them"
    if getattr(attention, "sinks", None) is not None:
        yield f"{name}: has sinks, which take a share of every sum of exponentials"
    for rate in _RATES:
        value = getattr(attention, rate, 0.0)
        value = value.p if isinstance(value, nn.Module) and hasattr(value, "p") else value
        if isinstance(value, int | float) and value > 0:
            yield f"{name}: {rate} = {value}: probabilities that are to be dropped never exist"
