"""Small random models of transformers, one of each architecture, in float64; and what a rank is to have of them."""

from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.hf.stored import stored_of
from plait.parallel.apply import ownership_of
from plait.parallel.shard import shard_tensor

VOCAB = 67
"""Cut unevenly at every degree that tests have."""

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""What all share, where they have it."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5, "head_dim": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 4},
    "gemma": {"head_dim": 4},
    "gemma2": {"head_dim": 4, "sliding_window": 5, "query_pre_attn_scalar": 4},
    "gemma3_text": {"head_dim": 4, "sliding_window": 5, "query_pre_attn_scalar": 4},
    "vaultgemma": {"head_dim": 4, "sliding_window": 5, "query_pre_attn_scalar": 4},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": {"sliding_window": 5},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True, "head_dim": 4},
    "phi3": {"pad_token_id": 0},
    "glm": {"head_dim": 4, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "glm4": {"head_dim": 4, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {"rotary_dim": 2},
    "gpt2": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    "smollm3": {"no_rope_layer_interval": 2},
    "cohere": {},
    "cohere2": {"sliding_window": 5, "head_dim": 4},
    "nemotron": {},
    "arcee": {},
    "apertus": {},
    "helium": {"head_dim": 4},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "ernie4_5": {"use_bias": True},
    "seed_oss": {"head_dim": 4, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "hyperclovax": {},
    "jais2": {},
    "ministral": {"head_dim": 4},
    "ministral3": {"head_dim": 4},
    "nanochat": {},
    "cwm": {"head_dim": 4, "sliding_window": 5},
    "apertus1p5_text": {},
    "gemma4_unified_text": {"head_dim": 4, "global_head_dim": 4, "sliding_window": 5},
}
"""What each needs beside the sizes that all share, by transformers' name of the architecture."""


def build_config(name: str, **other: Any) -> Any:
    """The config of a small model."""
    from transformers import AutoConfig

    values = {**SIZES, **ARCHITECTURES.get(name, {}), **other}
    kind = type(AutoConfig.for_model(name))
    known = {field for each in kind.__mro__ for field in getattr(each, "__annotations__", {})} | set(kind.attribute_map)
    return kind(**{field: value for field, value in values.items() if field in known})


def build_model(name: str, *, attn_implementation: str | None = None, **other: Any) -> Any:
    """A small model in float64, in evaluation mode, whose weights are all random (also norms and biases)."""
    from transformers import AutoModelForCausalLM

    config = build_config(name, **other)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attn_implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, param in model.named_parameters():
            values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            is_scale = param.dim() == 1 and path.endswith("weight")
            param.copy_(1 + 0.3 * values if is_scale else 0.3 * values)
    return model.eval()


def build_skeleton(name: str, **other: Any) -> Any:
    """The same on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(build_config(name, **other), dtype=torch.float64).eval()


def draw_ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids, the same on every rank."""
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def cut_as(model: nn.Module, mesh: Mesh, whole: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What this rank's parameters of a parallel model are to hold, of tensors by their names in a checkpoint."""
    stored, ownership = stored_of(model), ownership_of(model)
    own: dict[str, Tensor | None] = {}
    for name, place in stored.items():
        tensor = whole[place.name]
        if tensor is not None:
            assert tuple(tensor.shape) == place.shape, name
            if place.dim is not None and place.interval is not None:
                tensor = tensor.narrow(place.dim, place.interval.start, len(place.interval))
            tensor = shard_tensor(tensor.t() if place.is_transposed else tensor, ownership[name], mesh.tp.rank)
        own[name] = tensor
    return own
