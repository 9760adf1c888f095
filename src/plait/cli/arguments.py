"""Arguments that several commands take."""

import click

source_argument = click.argument("source", metavar="MODEL")
"""A TOML file, a preset, or a Hugging Face `config.json` or its folder: what `load_run_config` takes."""

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
"""Overrides of the run config, `train.steps=100`."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
