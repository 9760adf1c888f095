"""What transformers' rules do not say of an architecture: which linears are packed, which norms span heads, GPT-2."""

from collections.abc import Callable
from typing import Any

from torch import nn

from plait.hf.heads import HeadCount
from plait.hf.packed import Part, is_linear, linear_shape

GPT2_RULES = {
    "wte": "embedding_rowwise",
    "h.*.attn.c_attn": "colwise",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
"""A plan of ours for a model without one."""

FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm")
"""Norms behind the last layer, by their name in the base model."""

POSITIONS = ("wpe",)
"""Embeddings before the first layer, beside that of the tokens, by their name in the base model."""

HEAD_NORMS = ("CohereLayerNorm",)
"""Norms of each head for itself that have weights of their own for each head, `[N, H]`."""

ROW_DROPOUTS = ("resid_dropout", "dropout")
"""Dropouts in a region that are behind its row linear."""

FEATURE_NORMS = ("Olmo2RMSNorm", "Olmo3RMSNorm")
"""RMSNorms that multiply by their weight before they cast; they may span all heads of an attention."""

EXITS = {"gpt2": "ln_f"}
"""Of base models that read the shape of what the last module gives: its name in the base model, by model type."""

INTERLEAVED = ("CodeGenAttention",)
"""Attentions whose packed projection has the heads in groups, each of queries, values and keys."""


def is_activation(module: nn.Module) -> bool:
    """Whether a module with parameters works element by element, as the learned activation of Apertus does."""
    return type(module).__name__ == "XIELUActivation"


def find_rules(model: Any) -> dict[str, str]:
    """Transformers' tensor-parallel rules of a model, by module path pattern; those of ours for GPT-2."""
    rules: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if getattr(model.config, "model_type", None) == "gpt2":
        prefix = f"{model.base_model_prefix}."
        rules |= {prefix + pattern: rule for pattern, rule in GPT2_RULES.items()}
    return rules


def find_parts(owner: nn.Module, leaf: str, module: nn.Module, heads: HeadCount | None) -> tuple[Part, ...]:
    """The parts of the packed linear `leaf` of `owner`; none where it is one linear."""
    build = _PARTS.get((type(owner).__name__, leaf))
    return build(linear_shape(module)[0], heads) if build and is_linear(module) else ()


def _build_halves(features: int, _: HeadCount | None) -> tuple[Part, ...]:
    return Part("gate", features // 2), Part("up", features // 2)


def _build_heads(features: int, heads: HeadCount | None) -> tuple[Part, ...]:
    assert heads is not None
    width = features // (heads.num_heads + 2 * heads.num_kv_heads)
    kv_features = heads.num_kv_heads * width
    return Part("q", heads.num_heads * width), Part("k", kv_features), Part("v", kv_features)


_PARTS: dict[tuple[str, str], Callable[[int, HeadCount | None], tuple[Part, ...]]] = {
    ("GPT2Attention", "c_attn"): _build_heads,
    ("Phi3Attention", "qkv_proj"): _build_heads,
    ("Phi3MLP", "gate_up_proj"): _build_halves,
    ("GlmMLP", "gate_up_proj"): _build_halves,
    ("Glm4MLP", "gate_up_proj"): _build_halves,
}
"""By class of the module around it, and name in that."""
