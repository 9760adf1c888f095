"""The symbolic half runs where torch and numpy are not installed."""

import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.source_tree import PACKAGE, ROOT, load_import_contracts

BLOCKED = ("torch", "numpy", "safetensors", "tokenizers", "tensorboard")
COMMANDS = (
    ["models"],
    ["explain", "linear", "8192x8192x32768", "--degrees", "1,2"],
    ["explain", "llama3-8b", "--tp", "4"],
    ["--help"],
)


def _symbolic_modules() -> Iterator[str]:
    contract = next(each for each in load_import_contracts() if each["type"] == "forbidden")
    for name in contract["source_modules"]:
        yield name
        folder = PACKAGE.joinpath(*name.split(".")[1:])
        for module in pkgutil.walk_packages([str(folder)], f"{name}.") if folder.is_dir() else ():
            yield module.name


def _run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which importing one of `BLOCKED` fails."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}, None)); "
    return subprocess.run([sys.executable, "-c", blocked + code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_module_of_the_symbolic_half_imports_without_torch() -> None:
    names = list(_symbolic_modules())
    assert len(names) > 20, names
    run = _run_without_torch("; ".join(f"import {name}" for name in ["plait", *names]))
    assert run.returncode == 0, run.stderr


def test_this_check_can_fail() -> None:
    run = _run_without_torch("import plait.parallel.linear")
    assert run.returncode != 0
    assert "torch" in run.stderr


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_of_the_symbolic_half_run_without_torch(arguments: list[str]) -> None:
    run = _run_without_torch(f"from plait.cli.main import main; sys.argv = ['plait', *{arguments}]; main()")
    assert run.returncode == 0, run.stderr
    assert run.stdout
