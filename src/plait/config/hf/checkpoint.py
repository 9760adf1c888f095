"""A model that is trained further: a Hugging Face directory, whose `config.json` says everything else.

The architecture may be any that can be made parallel; what is read here is what a run has to be checked against before
anything starts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from plait.config.hf.lora import LoraConfig, derive_lora_fields
from plait.config.hf.read import load_hf_json
from plait.config.section import Count, Problem, Section
from plait.errors import ConfigError

TOKENIZER = "tokenizer.json"

_NAMES: dict[str, tuple[str, ...]] = {
    "model_type": ("model_type",),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "mlp_width": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
}
"""By our name, those that architectures have for it, of which the first that has a value counts."""

_OPTIONAL = ("mlp_width",)

_UNSEEDED = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Rates that transformers hands to kernels, whose masks no seed of ours decides: no run could be repeated."""

_DEFAULTS = {"gpt2": {"attn_pdrop": 0.1}}
"""What transformers takes for a rate that is not in the config, where that is not 0, by model type."""


class CheckpointModel(Section):
    """A Hugging Face directory that is trained further. `path` is given; the rest is read from its config.json.

    With `lora` its weights stay as they are, and adapters are trained.
    """

    family: Literal["hf"] = "hf"
    path: Annotated[str, Field(min_length=1)]
    """The directory: config.json, weights in safetensors and, unless `data.tokenizer` is given, tokenizer.json."""
    model_type: str
    num_layers: Count
    width: Count
    num_heads: Count
    num_kv_heads: Count
    head_width: Count
    mlp_width: Count | None = None
    vocab_size: Count
    max_seq_len: Count
    lora: LoraConfig | None = None


def derive_checkpoint_fields(model: Mapping[str, Any]) -> dict[str, Any] | Problem:
    """The fields of a model section that has a `path`."""
    path = model["path"]
    other = next((key for key in model if key not in ("path", "family", "lora")), None)
    if other is not None:
        return Problem(f"model.{other}", "cannot be given beside model.path, whose config.json says it", "leave it out")
    if not isinstance(path, str):
        return Problem("model.path", "should be a string")
    folder = Path(path)
    if not folder.is_dir():
        return Problem("model.path", "there is no such directory", "give the directory of a Hugging Face model")
    if not (folder / "config.json").is_file():
        return Problem("model.path", "has no config.json", "give the directory of a Hugging Face model")
    try:
        source = load_hf_json(folder / "config.json")
    except ConfigError as error:
        return Problem("model.path", error.message)
    fields = _read_fields(path, source)
    if isinstance(fields, Problem) or model.get("lora") is None:
        return fields
    lora = derive_lora_fields(model["lora"])
    return lora if isinstance(lora, Problem) else {**fields, "lora": lora}


def _read_fields(path: str, source: Mapping[str, Any]) -> dict[str, Any] | Problem:
    found = {
        ours: next((source[name] for name in names if source.get(name) is not None), None)
        for ours, names in _NAMES.items()
    }
    rates = {**_DEFAULTS.get(str(source.get("model_type")), {}), **source}
    dropped = next((key for key in _UNSEEDED if rates.get(key)), None)
    if dropped is not None:
        text = f"its config has {dropped} = {rates[dropped]!r}, a dropout whose masks would differ from run to run"
        return Problem("model.path", text, f"set {dropped} to 0 in its config.json; other dropouts may stay")
    absent = [names for ours, names in _NAMES.items() if found[ours] is None and ours not in _OPTIONAL]
    if absent:
        listed = ", ".join(" or ".join(names) for names in absent)
        return Problem("model.path", f"its config.json (model_type = {source.get('model_type')}) has no {listed}")
    wrong = {names[0]: found[ours] for ours, names in _NAMES.items() if not _is_valid(ours, found[ours])}
    if wrong:
        key, value = next(iter(wrong.items()))
        return Problem("model.path", f"its config.json has {key} = {value!r}")
    head_width = source.get("head_dim") or max(1, int(found["width"] or 0) // int(found["num_heads"] or 1))
    fields = {"family": "hf", "path": path, "head_width": head_width, **found}
    return {key: value for key, value in fields.items() if value is not None}


def _is_valid(ours: str, value: Any) -> bool:
    if ours == "model_type":
        return isinstance(value, str)
    return value is None or (isinstance(value, int) and value >= 1)
