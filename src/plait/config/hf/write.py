"""Writing the `config.json` that describes one of our models to Hugging Face: what `plait.config.hf.read` reads."""

from typing import Any

from plait.config.model import GptConfig, LlamaConfig


def build_hf_config(model: LlamaConfig | GptConfig, *, dtype: str, end_of_text: int | None = None) -> dict[str, Any]:
    """What goes into `config.json`; `end_of_text` is the id of the token that ends a document, where it is known.

    Both ids of special tokens are written in any case: the defaults of the architecture are those of another tokenizer.
    """
    convert = _convert_llama if isinstance(model, LlamaConfig) else _convert_gpt
    ids = {"bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": None}
    shared = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tied_embeddings, "dtype": dtype, **ids}
    return {**convert(model), **shared}


def _convert_llama(model: Any) -> dict[str, Any]:
    """Biases on query, key and value are what tells Qwen2 from Llama."""
    kind = ("qwen2", "Qwen2ForCausalLM") if model.qkv_bias else ("llama", "LlamaForCausalLM")
    biases = {"use_sliding_window": False} if model.qkv_bias else {"attention_bias": False, "mlp_bias": False}
    return {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "hidden_size": model.width,
        "intermediate_size": model.mlp_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": _convert_rope(model),
        "attention_dropout": 0.0,
        **biases,
    }


def _convert_rope(model: LlamaConfig) -> dict[str, Any]:
    if model.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": model.rope_theta,
        "factor": model.rope_scaling.factor,
        "low_freq_factor": model.rope_scaling.low_freq_factor,
        "high_freq_factor": model.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": model.rope_scaling.original_max_seq_len,
    }


def _convert_gpt(model: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": model.width,
        "n_inner": model.mlp_width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_positions": model.max_seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
    }
