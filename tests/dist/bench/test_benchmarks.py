"""The benchmarks run, at sizes at which their times say nothing: what is measured once in a while must not rot between."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

SMALL = {
    "checkpoint": ["--width", "64", "--layers", "1", "--rounds", "1", "--steps", "1"],
    "host_overhead": ["--rounds", "2", "--steps", "1"],
    "quantize": ["--rounds", "2", "--seconds", "0.0001"],
    "recompute": ["--rounds", "1", "--layers", "2", "--width", "128", "--seq-len", "32", "--batch", "1"],
    "same_host": ["--items", "block-64", "--peers", "unsharded", "compute_only", "plait:tp", "--rounds", "1"],
}


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_writes_its_record(name: str, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *SMALL[name], "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    record, committed = (json.loads(path.read_text()) for path in (out, ROOT / "benchmarks" / f"{name}.json"))
    assert record.keys() == committed.keys()
