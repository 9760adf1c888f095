"""Models known by name: published ones, and small ones to try and test with."""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.config.model import GptConfig, Llama3RopeScaling, LlamaConfig
from plait.errors import ConfigError, describe_nearest


@dataclass(frozen=True)
class Preset:
    """A model and where its numbers come from."""

    config: LlamaConfig | GptConfig
    source: str


_LLAMA2 = {"vocab_size": 32_000, "max_seq_len": 4096}
_LLAMA3 = {"vocab_size": 128_256, "rope_theta": 500_000.0, "num_kv_heads": 8}
_LLAMA31_SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
_KORTHIKANTI = {"vocab_size": 51_200, "max_seq_len": 2048, "dropout": 0.1, "attention_dropout": 0.1}
_TINY = {"num_layers": 2, "width": 64, "num_heads": 8, "vocab_size": 256, "max_seq_len": 64}

_KORTHIKANTI_SOURCE = "Korthikanti et al., arXiv:2205.05198, table 3"


def _llama(source: str, *shared: Mapping[str, object], **fields: object) -> Preset:
    return Preset(LlamaConfig.model_validate({**_merge(shared), **fields}), source)


def _gpt(source: str, *shared: Mapping[str, object], **fields: object) -> Preset:
    return Preset(GptConfig.model_validate({**_merge(shared), **fields}), source)


def _merge(parts: tuple[Mapping[str, object], ...]) -> dict[str, object]:
    return {key: value for part in parts for key, value in part.items()}


_PRESETS: dict[str, Preset] = {
    "llama2-7b": _llama(
        "Llama 2, arXiv:2307.09288", _LLAMA2,
        num_layers=32, width=4096, num_heads=32, num_kv_heads=32, mlp_width=11_008,
    ),
    "llama2-70b": _llama(
        "Llama 2, arXiv:2307.09288", _LLAMA2,
        num_layers=80, width=8192, num_heads=64, num_kv_heads=8, mlp_width=28_672,
    ),
    "llama3-8b": _llama(
        "Llama 3, arXiv:2407.21783", _LLAMA3,
        num_layers=32, width=4096, num_heads=32, mlp_width=14_336, max_seq_len=8192,
    ),
    "llama3-70b": _llama(
        "Llama 3, arXiv:2407.21783", _LLAMA3,
        num_layers=80, width=8192, num_heads=64, mlp_width=28_672, max_seq_len=8192,
    ),
    "llama3-405b": _llama(
        "Llama 3.1, arXiv:2407.21783", _LLAMA3,
        num_layers=126, width=16_384, num_heads=128, mlp_width=53_248, max_seq_len=131_072,
        rope_scaling=_LLAMA31_SCALING,
    ),
    "qwen2.5-72b": _llama(
        "Qwen2.5, arXiv:2412.15115",
        num_layers=80, width=8192, num_heads=64, num_kv_heads=8, mlp_width=29_568, vocab_size=152_064,
        max_seq_len=131_072, norm_eps=1e-5, rope_theta=1_000_000.0, qkv_bias=True,
    ),
    "smollm2-135m": _llama(
        "SmolLM2, arXiv:2502.02737",
        num_layers=30, width=576, num_heads=9, num_kv_heads=3, mlp_width=1536, vocab_size=49_152,
        max_seq_len=8192, rope_theta=100_000.0, tied_embeddings=True,
    ),
    "gpt2": _gpt(
        "GPT-2 (Radford et al., 2019), 124M",
        num_layers=12, width=768, num_heads=12, vocab_size=50_257, max_seq_len=1024,
        dropout=0.1, attention_dropout=0.1,
    ),
    "gpt3-175b": _gpt(
        "GPT-3, arXiv:2005.14165, table 2.1",
        num_layers=96, width=12_288, num_heads=96, vocab_size=50_257, max_seq_len=2048,
    ),
    "gpt-22b": _gpt(_KORTHIKANTI_SOURCE, _KORTHIKANTI, num_layers=48, width=6144, num_heads=64),
    "gpt-175b": _gpt(_KORTHIKANTI_SOURCE, _KORTHIKANTI, num_layers=96, width=12_288, num_heads=96),
    "gpt-530b": _gpt(_KORTHIKANTI_SOURCE, _KORTHIKANTI, num_layers=105, width=20_480, num_heads=128),
    "gpt-1t": _gpt(_KORTHIKANTI_SOURCE, _KORTHIKANTI, num_layers=128, width=25_600, num_heads=160),
    "llama-tiny": _llama("for tests: grouped-query attention", _TINY, num_kv_heads=4, mlp_width=96),
    "llama-tiny-gqa2": _llama("for tests: two KV heads, replicated beyond tp 2", _TINY, num_kv_heads=2, mlp_width=96),
    "qwen-tiny": _llama(
        "for tests: biases on query, key and value", _TINY, num_kv_heads=4, mlp_width=96, qkv_bias=True
    ),
    "smollm-tiny": _llama("for tests: tied embeddings", _TINY, num_kv_heads=4, mlp_width=96, tied_embeddings=True),
    "gpt-tiny": _gpt("for tests: dropout, biases, tied embeddings", _TINY, dropout=0.1, attention_dropout=0.1),
    "llama-demo": _llama(
        "for the demo: learns source code in minutes on two cores",
        num_layers=2, width=128, num_heads=4, num_kv_heads=2, mlp_width=352, vocab_size=4096, max_seq_len=256,
    ),
}  # fmt: skip


def list_presets() -> Mapping[str, Preset]:
    """Every preset by its name, published ones first."""
    return _PRESETS


def load_preset(name: str) -> LlamaConfig | GptConfig:
    """The model of that name.

    Raises:
        ConfigError: there is none; the nearest name is the hint.
    """
    if name not in _PRESETS:
        raise ConfigError(f'there is no preset "{name}"', hint=describe_nearest(name, _PRESETS))
    return _PRESETS[name].config
