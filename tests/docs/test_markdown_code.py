"""What the documentation shows is what happens."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.markdown import Block, list_blocks, list_blocks_of, list_pages
from tests.support.source_tree import ROOT

LANGUAGES = {"console", "pycon", "python", "sh", "toml", "json", "text", ""}
PLAIN = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
RUN = [block for block in list_blocks_of("console") if block.not_run is None]
PAGES_WITH_SESSIONS = [page for page in list_pages() if any(b.language == "pycon" for b in list_blocks(page))]
PAGES_WITH_SCRIPTS = [page for page in list_pages() if any(b.language == "python" for b in list_blocks(page))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.where)
def test_console_blocks_print_what_they_show(block: Block) -> None:
    """`$` lines are run, the lines below must be what they print; a line `...` stands for any lines."""
    for command, shown in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        program, *arguments = shlex.split(command)
        assert program == "plait", f"{block.where}: only plait is run here; mark `{program}` as not run, or use ```sh"
        run = subprocess.run(
            [sys.executable, "-m", "plait", *arguments],
            cwd=ROOT, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        printed = "\n".join(line.rstrip() for line in run.stdout.splitlines())
        wanted = "\n".join(line.rstrip() for line in shown.splitlines())
        pattern = re.escape(wanted).replace(r"\.\.\.", "(?s:.*)")
        assert re.fullmatch(pattern, printed), f"{block.where}: $ {command}\n{printed}"


@pytest.mark.parametrize("page", PAGES_WITH_SESSIONS, ids=_name)
def test_interpreter_sessions_print_what_they_show(page: Path) -> None:
    """All `>>>` blocks of a page are one session."""
    session = "\n".join(block.text for block in list_blocks(page) if block.language == "pycon")
    test = doctest.DocTestParser().get_doctest(session, {}, _name(page), str(page), 0)
    report: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert tried > 0
    assert failed == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES_WITH_SCRIPTS, ids=_name)
def test_scripts_run(page: Path, tmp_path: Path) -> None:
    """All python blocks of a page are one script."""
    blocks = [block for block in list_blocks(page) if block.language == "python"]
    script = tmp_path / "script.py"
    script.write_text("\n".join(block.text for block in blocks))
    run = subprocess.run([sys.executable, script], cwd=tmp_path, env=PLAIN, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{blocks[0].where}\n{run.stdout}{run.stderr}"


def test_every_block_says_what_it_is() -> None:
    assert [
        block.where for page in list_pages() for block in list_blocks(page) if block.language not in LANGUAGES
    ] == []


def test_only_blocks_that_train_or_install_are_not_run() -> None:
    left_out = [block for page in list_pages() for block in list_blocks(page) if block.not_run]
    assert [block.where for block in left_out if block.language != "console"] == []
