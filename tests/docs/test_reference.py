import subprocess
import sys
from pathlib import Path

import pytest

from plait.config.load import load_run_config
from tests.support.source_tree import ROOT


def test_the_generated_reference_is_current() -> None:
    run = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.stdout}{run.stderr}run `make docs`"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_config_loads(path: Path) -> None:
    config = load_run_config(str(path))
    assert config.name == path.stem
