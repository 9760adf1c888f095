"""`plait generate` on ranks that it starts itself, and as ranks of torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.generation import save_folder

ARGUMENTS = ("--prompt", "abc", "--prompt", "hello, world", "--max-new-tokens", "6", "--json")


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], text=True, capture_output=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """On one rank."""
    return [json.loads(line)["tokens"] for line in run("plait", "generate", str(folder), *ARGUMENTS).splitlines()]


def test_it_starts_its_ranks(folder: Path, expected: list[list[int]]) -> None:
    out = run("plait", "generate", str(folder), *ARGUMENTS, "--tp", "2", "--overlap", "full")
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == expected


def test_it_runs_as_ranks_of_torchrun(folder: Path, expected: list[list[int]]) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    out = run(*launcher, "plait", "generate", str(folder), *ARGUMENTS)
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == expected
