"""What `plait plan --write` writes is what `plait train` runs, unchanged."""

import json
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.support.training import NANO_RUN, save_tokens


def test_train_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(NANO_RUN)
    save_tokens(tmp_path)
    for arguments in (
        ["plan", "run.toml", "--hardware", "cpu", "--gpus", "1", "--global-batch", "4", "--write", "plan.toml"],
        ["train", "plan.toml"],
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as status:
            main(arguments)
        assert status.value.code == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == 2
