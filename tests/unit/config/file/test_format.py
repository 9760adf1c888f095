"""A run config as TOML loads as the same."""

from pathlib import Path

import pytest

from plait.config.file.format import format_run_config
from plait.config.load import load_run_config
from plait.config.presets import list_presets


@pytest.mark.parametrize("preset", list_presets())
def test_every_preset_survives(preset: str, tmp_path: Path) -> None:
    overrides = [
        "overlap=full",
        'name="a-b"',
        "train.learning_rate=1e-05",
        "data.kind=text",
        "data.paths=['a \"b\"', 'c']",
    ]
    run = load_run_config(preset, [*overrides, "data.tokenizer=t.json", "precision.reduce=float32"])
    path = tmp_path / "run.toml"
    path.write_text(format_run_config(run), encoding="utf-8")
    assert load_run_config(str(path)) == run
