"""Low-rank adapters that are trained instead of the weights of a Hugging Face directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from plait.config.hf.read import load_hf_json
from plait.config.section import Probability, Problem, Section
from plait.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"

_FIELDS = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
"""By their names in peft, those that we have."""

_UNUSED = (
    "use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform",
    "exclude_modules", "layer_replication", "target_parameters", "trainable_token_indices", "use_qalora", "use_bdlora",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
"""What a config of peft may ask for beside these, and a run cannot."""


def _derive_alpha(fields: dict[str, Any]) -> float:
    return 2.0 * float(fields["rank"])


class LoraConfig(Section):
    """Adapters: `x -> base(x) + alpha / rank * B(A(dropout(x)))`, `A` of `rank` rows, `B` of zeros at the start."""

    rank: Annotated[int, Field(ge=1, le=65_536)]
    alpha: PositiveFloat = Field(default_factory=_derive_alpha)
    """`2 * rank` unless given."""
    dropout: Probability = 0.0
    target_modules: list[str] | None = None
    """Ends of the paths of the linears with adapters, as peft takes them; all linears in the layers unless given."""
    path: str | None = None
    """A directory of peft whose adapters are trained further; everything else is then read from it."""


def derive_lora_fields(lora: Any) -> dict[str, Any] | Problem:
    """The fields of a section that may have a `path`."""
    if not isinstance(lora, Mapping):
        return Problem("model.lora", "should be a table", "model.lora.rank=8")
    if "path" not in lora:
        return dict(lora)
    path = lora["path"]
    other = next((key for key in lora if key != "path"), None)
    if other is not None:
        hint = "leave it out"
        return Problem(
            f"model.lora.{other}", f"cannot be given beside model.lora.path, whose {ADAPTER_CONFIG} says it", hint
        )
    if not isinstance(path, str):
        return Problem("model.lora.path", "should be a string")
    if not (Path(path) / ADAPTER_CONFIG).is_file():
        return Problem(
            "model.lora.path", f"has no {ADAPTER_CONFIG}", "give a directory that peft or plait convert wrote"
        )
    try:
        source = load_hf_json(Path(path) / ADAPTER_CONFIG)
    except ConfigError as error:
        return Problem("model.lora.path", error.message)
    return _read_fields(path, source)


def _read_fields(path: str, source: Mapping[str, Any]) -> dict[str, Any] | Problem:
    asked = {key: source[key] for key in _UNUSED if source.get(key)}
    if source.get("peft_type") != "LORA":
        asked["peft_type"] = source.get("peft_type")
    if source.get("bias", "none") != "none":
        asked["bias"] = source["bias"]
    if not isinstance(source.get("target_modules"), list):
        asked["target_modules"] = source.get("target_modules")
    if asked:
        key, value = next(iter(asked.items()))
        return Problem("model.lora.path", f"its {ADAPTER_CONFIG} has {key} = {value!r}, which cannot be trained here")
    found = {ours: source[theirs] for theirs, ours in _FIELDS.items() if source.get(theirs) is not None}
    floats = {key: float(found[key]) for key in ("alpha", "dropout") if isinstance(found.get(key), int)}
    return {"path": path, **found, **floats, "target_modules": sorted(found["target_modules"])}
