"""What `plait plan --write` writes is what `plait train` runs, unchanged."""

import json
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.support.training import save_tokens

RUN = """
name = "planned"
[model]
preset = "llama-tiny"
vocab_size = 257
[precision]
compute = "float32"
[data]
kind = "tokens"
paths = ["tokens.npy"]
[train]
steps = 2
seq_len = 16
"""


def test_train_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
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
