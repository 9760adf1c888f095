"""`plait models`: the models known by name."""

import json
from typing import Any

import click

from plait.cli.arguments import json_option
from plait.config.presets import Preset, list_presets
from plait.units import format_si


@click.command("models")
@json_option
def command(as_json: bool) -> None:
    """List the models known by name, a line each: parameters, layers, widths and where the numbers come from."""
    presets = list_presets()
    if as_json:
        listed = [_describe(name, preset) for name, preset in presets.items()]
        click.echo(json.dumps(listed, indent=2))
        return
    longest = max(map(len, presets))
    for name, preset in presets.items():
        click.echo(f"{name:<{longest}}  {_build_line(preset)}")


def _build_line(preset: Preset) -> str:
    model = preset.config
    heads = f"{model.num_heads}" + (f"/{model.num_kv_heads}" if model.num_kv_heads != model.num_heads else "")
    return (
        f"{format_si(model.num_parameters, ''):>7} parameters  {model.num_layers:>3} layers  "
        f"width {model.width:<5}  mlp {model.mlp_width:<6}  heads {heads:<6}  vocab {model.vocab_size:<6}  "
        f"seq {model.max_seq_len:<6}  {preset.source}"
    )


def _describe(name: str, preset: Preset) -> dict[str, Any]:
    model = preset.config
    return {"name": name, "num_parameters": model.num_parameters, "source": preset.source, **model.model_dump()}
