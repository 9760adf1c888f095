"""Reading the `config.json` of a Hugging Face model: the Llama-shaped architectures and GPT-2.

What our models do not compute is refused by name and value, never ignored. A Mistral sliding window is kept as a
shorter `max_seq_len`: within the window, windowed attention and full attention are the same.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.config.section import Problem
from plait.errors import ConfigError, describe_nearest

Fields = Mapping[str, Any]


def is_hf_config(path: Path) -> bool:
    """Whether `path` is a JSON file, or a folder with a `config.json`."""
    return (path.suffix == ".json" and path.is_file()) or (path / "config.json").is_file()


def load_hf_fields(path: Path) -> dict[str, Any]:
    """Fields of our model config, `family` among them, from a `config.json` or the folder that holds it.

    Raises:
        ConfigError: not readable, of an unsupported `model_type`, or with a feature our models do not have.
    """
    file = path / "config.json" if path.is_dir() else path
    source = load_hf_json(file)
    convert = _CONVERTERS.get(str(source.get("model_type")))
    if convert is None:
        model_type = json.dumps(source.get("model_type"))
        hint = describe_nearest(str(source.get("model_type")), _CONVERTERS)
        raise ConfigError(f"{file}: model_type = {model_type} is not supported", hint=hint)
    try:
        fields, problems = convert(source)
    except KeyError as error:
        raise ConfigError(f"{file}: {error.args[0]} is required for model_type = {source['model_type']}") from error
    if problems:
        raise ConfigError.from_problems(str(file), [f"{problem.key} = {problem.text}" for problem in problems])
    return {key: value for key, value in fields.items() if value is not None}


def load_hf_json(file: Path) -> dict[str, Any]:
    """What a `config.json` says.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
    """
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if not isinstance(source, dict):
        raise ConfigError(f"{file}: a Hugging Face config is a JSON object, this is a {type(source).__name__}")
    return source


def _convert_llama(source: Fields) -> tuple[dict[str, Any], list[Problem]]:
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    rope, problems = _convert_rope(source)
    kv_heads = source.get("num_key_value_heads")
    fields = {
        "family": "llama",
        "num_layers": source["num_hidden_layers"],
        "width": source["hidden_size"],
        "num_heads": source["num_attention_heads"],
        "num_kv_heads": source["num_attention_heads"] if kv_heads is None else kv_heads,
        "head_width": source.get("head_dim"),
        "mlp_width": source["intermediate_size"],
        "vocab_size": source["vocab_size"],
        "max_seq_len": source.get("max_position_embeddings", 2048),
        "norm_eps": source.get("rms_norm_eps", 1e-6),
        "tied_embeddings": source.get("tie_word_embeddings", False),
        **rope,
    }
    return fields, [*_list_differences(source, expected), *problems]


def _convert_mistral(source: Fields) -> tuple[dict[str, Any], list[Problem]]:
    fields, problems = _convert_llama(source)
    window, length = source.get("sliding_window"), fields["max_seq_len"]
    if isinstance(window, int) and isinstance(length, int):
        fields["max_seq_len"] = min(length, window)
    return fields, problems


def _convert_qwen2(source: Fields) -> tuple[dict[str, Any], list[Problem]]:
    fields, problems = _convert_llama(source)
    fields["qkv_bias"] = True
    return fields, [*problems, *_list_differences(source, {"use_sliding_window": False})]


def _convert_gpt2(source: Fields) -> tuple[dict[str, Any], list[Problem]]:
    expected = {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "embd_pdrop": source.get("resid_pdrop", 0.1),
    }
    fields = {
        "family": "gpt",
        "num_layers": source["n_layer"],
        "width": source["n_embd"],
        "num_heads": source["n_head"],
        "mlp_width": source.get("n_inner"),
        "vocab_size": source["vocab_size"],
        "max_seq_len": source["n_positions"],
        "norm_eps": source.get("layer_norm_epsilon", 1e-5),
        "dropout": source.get("resid_pdrop", 0.1),
        "attention_dropout": source.get("attn_pdrop", 0.1),
        "tied_embeddings": source.get("tie_word_embeddings", True),
    }
    return fields, list(_list_differences(source, expected))


_CONVERTERS: dict[str, Callable[[Fields], tuple[dict[str, Any], list[Problem]]]] = {
    "llama": _convert_llama,
    "mistral": _convert_mistral,
    "qwen2": _convert_qwen2,
    "gpt2": _convert_gpt2,
}


def _convert_rope(source: Fields) -> tuple[dict[str, Any], list[Problem]]:
    """Transformers 4 writes `rope_theta` and `rope_scaling`, Transformers 5 both in `rope_parameters`."""
    parameters = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        return {}, [Problem("rope_scaling", f"{json.dumps(parameters)}: should be an object")]
    fields = {"rope_theta": parameters.get("rope_theta", source.get("rope_theta", 10_000.0))}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "llama3":
        fields["rope_scaling"] = {
            "factor": parameters["factor"],
            "low_freq_factor": parameters["low_freq_factor"],
            "high_freq_factor": parameters["high_freq_factor"],
            "original_max_seq_len": parameters["original_max_position_embeddings"],
        }
    elif kind != "default":
        return fields, [Problem("rope_type", f'{json.dumps(kind)}: only "llama3" and "default" are supported')]
    return fields, []


def _list_differences(source: Fields, expected: Fields) -> Iterator[Problem]:
    for key, value in expected.items():
        if source.get(key, value) != value:
            yield Problem(key, f"{json.dumps(source[key])}: only {json.dumps(value)} is supported")
