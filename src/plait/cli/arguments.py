"""Arguments that several commands take."""

import click

source_argument = click.argument("source", metavar="MODEL")
"""A TOML file, a preset, or a Hugging Face `config.json` or its folder: what `load_run_config` takes."""

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
"""Overrides of the run config, `train.steps=100`."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

dtype_option = click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="[default: that of the config]"
)
"""Of the weights that generate."""

overlap_option = click.option(
    "--overlap",
    type=click.Choice(["disabled", "mlp_only", "full", "auto"]),
    default="disabled",
    show_default=True,
    help="Of collectives with GEMMs, where prompts are read",
)
"""Of what generates."""
