"""Small random Hugging Face models, as directories."""

from pathlib import Path
from typing import Any

import torch

_SMALL = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Cuts unevenly: 67 rows of vocabulary, 37 columns of the MLP, 3 KV heads that are replicated at tp 4."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL},
    "llama-tied": {**_SMALL, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_SMALL, "model_type": "qwen2"},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 67, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 32,
        "n_inner": 37, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "phi3": {**_SMALL, "model_type": "phi3", "pad_token_id": 0, "hidden_size": 24},
}  # fmt: skip
"""Fields of a config by the name of a test."""


def build_hf_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
    """A model of transformers with random weights, also where it would have ones and zeros (norms, biases)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"model_type": name, **CONFIGS[name], **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.2
            param.copy_(drawn + 1 if param.dim() == 1 else drawn)
    return model


def save_hf_model(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, max_shard_size: str | int = "5GB", **fields: Any
) -> Path:
    """The directory of such a model, written by transformers."""
    build_hf_model(name, dtype=dtype, **fields).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
