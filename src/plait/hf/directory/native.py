"""Where the parameters of our Llama and GPT-2 families are in checkpoints of Hugging Face."""

from plait.config.model import GptConfig, LlamaConfig
from plait.hf.stored import Stored
from plait.models.registry import build_model
from plait.sharding import Interval

_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}

_GPT = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    "attention.wq": "attn.c_attn",
    "attention.wk": "attn.c_attn",
    "attention.wv": "attn.c_attn",
    "attention.wo": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.w_up": "mlp.c_fc",
    "mlp.w_down": "mlp.c_proj",
}

_PACKED = ("attention.wq", "attention.wk", "attention.wv")
"""GPT-2 keeps these, in this order, in one tensor."""


def list_native_stored(config: LlamaConfig | GptConfig) -> dict[str, Stored]:
    """Where each parameter of the native model is, by FQN."""
    model = build_model(config, device="meta")
    locate = _locate_gpt if isinstance(config, GptConfig) else _locate_llama
    return {fqn: locate(fqn, tuple(param.shape)) for fqn, param in model.named_parameters()}


def _locate_llama(fqn: str, shape: tuple[int, ...]) -> Stored:
    layer, module, kind = _take_apart(fqn)
    within = "" if layer is None else f"model.layers.{layer}."
    return Stored(f"{within}{_LLAMA[module]}.{kind}", shape)


def _locate_gpt(fqn: str, shape: tuple[int, ...]) -> Stored:
    """Linears in the layers are `Conv1D`, whose weights are `[in, out]`."""
    layer, module, kind = _take_apart(fqn)
    within = "" if layer is None else f"transformer.h.{layer}."
    name = f"{within}{_GPT[module]}.{kind}"
    is_transposed = "." in module and len(shape) == 2
    held = shape[::-1] if is_transposed else shape
    if module not in _PACKED:
        return Stored(name, held, is_transposed=is_transposed)
    width, part = shape[0], _PACKED.index(module)
    interval = Interval(part * width, (part + 1) * width)
    return Stored(name, (*held[:-1], len(_PACKED) * width), len(held) - 1, interval, is_transposed)


def _take_apart(fqn: str) -> tuple[str | None, str, str]:
    """`layers.3.attention.wq.weight` -> `3`, `attention.wq`, `weight`."""
    path, _, kind = fqn.rpartition(".")
    if not path.startswith("layers."):
        return None, path, kind
    _, layer, module = path.split(".", 2)
    return layer, module, kind
