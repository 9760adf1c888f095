"""The soak, with few kills: `benchmarks/soak.py` takes fifty."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.source_tree import ROOT


@pytest.mark.timeout(1500)
def test_a_run_whose_ranks_are_killed_ends_as_if_nothing_had_happened(tmp_path):
    result = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks/soak.py", "--kills", "3", "--folder", tmp_path / "soak", "--out", result],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads(result.read_text())
    assert record["equal"] is True
    assert record["same_losses"] is True
    assert record["same_files"] != {}
    assert (record["kills"], record["restarts"], record["left_behind"]) == (3, 3, [])
    assert record["steps_repeated"] >= 0
