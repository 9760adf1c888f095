import subprocess
import sys

from tests.support.source_tree import ROOT

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]


def test_rooms_import_downwards_only_and_the_symbolic_half_is_torch_free() -> None:
    run = subprocess.run(LINT, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
