"""What a config may be loaded from: a TOML file, a preset by its name, a Hugging Face `config.json` or its folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config.file.toml import load_toml, merge_trees
from plait.config.hf.read import is_hf_config, load_hf_fields
from plait.config.model import FAMILIES
from plait.config.presets import list_presets, load_preset
from plait.config.section import Problem
from plait.errors import ConfigError, describe_nearest


def load_source(source: str) -> dict[str, Any]:
    """The tree of a TOML file; `model` alone from the other sources.

    Raises:
        ConfigError: there is no such thing, or it cannot be read.
    """
    path = Path(source)
    try:
        path.exists()
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    if source in list_presets() or is_hf_config(path):
        return {"model": _load_model(source)}
    if path.is_file():
        return load_toml(path)
    if path.is_dir():
        raise ConfigError(f"{path}: the folder has no config.json", hint="give a TOML file or a Hugging Face folder")
    if path.exists():
        raise ConfigError(f"{path}: is neither a file nor a folder", hint="give a TOML file or a Hugging Face folder")
    if path.suffix in (".toml", ".json") or len(path.parts) > 1:
        files = [str(file) for file in path.parent.glob(f"*{path.suffix}")]
        raise ConfigError(
            f"{source}: there is no such file", hint=describe_nearest(source, files or list_presets(), cutoff=0.7)
        )
    raise ConfigError(f'"{source}" is neither a file nor a preset', hint=describe_nearest(source, list_presets()))


def derive_model_fields(model: Mapping[str, Any]) -> dict[str, Any] | Problem:
    """Replace `preset` by the fields it stands for, under those that are written out."""
    fields = {key: value for key, value in model.items() if key != "preset"}
    if "preset" in model:
        try:
            preset = _load_model(model["preset"])
        except ConfigError as error:
            return Problem("model.preset", error.message, error.hint)
        if fields.get("family", preset["family"]) != preset["family"]:
            return Problem("model.family", f'the preset is of family "{preset["family"]}"', "leave model.family out")
        fields = merge_trees(preset, fields)
    if "family" not in fields:
        hint = f"presets are {', '.join(list_presets())}"
        return Problem("model.preset", "is required, unless model.family and its keys are given", hint)
    family = fields["family"]
    if not isinstance(family, str) or family not in FAMILIES:
        return Problem("model.family", "unknown family", describe_nearest(str(family), FAMILIES))
    return fields


def _load_model(name: Any) -> dict[str, Any]:
    """The fields that a preset or a Hugging Face config sets; what is derived from them stays open."""
    if not isinstance(name, str):
        raise ConfigError("should be a string")
    if name not in list_presets() and is_hf_config(Path(name)):
        return load_hf_fields(Path(name))
    config = load_preset(name)
    return {**config.model_dump(exclude_unset=True), "family": config.family}
