"""`plait train` in this process: on one rank, and what is refused before any rank waits for another."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from plait.cli.main import main
from plait.comm.mesh import build_mesh
from plait.sharding import MeshShape
from plait.train.claim import claim_folder
from tests.support.byte_tokenizer import save_byte_tokenizer
from tests.support.training import NANO_RUN, save_tokens

Run = Callable[..., tuple[int, str, str]]

LAUNCHED = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in a folder with a config and tokens: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano.toml").write_text(NANO_RUN)
    save_tokens(tmp_path)

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as status:
            main(["train", *arguments])
        assert isinstance(status.value.code, int)
        return status.value.code, *capsys.readouterr()

    return run


def test_stdout_is_the_summary_and_progress_goes_to_stderr(run: Run) -> None:
    status, out, err = run("nano.toml")
    summary = json.loads(out)
    assert status == 0
    assert summary["step"] == 2
    assert Path(summary["checkpoint"]).is_dir()
    assert len(Path(summary["metrics"]).read_text().splitlines()) == 2
    assert "step 2/2  loss 5." in err


def test_a_folder_that_another_run_has_is_refused_before_any_rank_starts(run: Run, tmp_path: Path) -> None:
    with claim_folder(tmp_path / "runs" / "nano", build_mesh(MeshShape())):
        status, _, err = run("nano.toml", "parallel.tp=2")
    assert status == 2
    assert "runs/nano: another run is writing there" in err
    assert "starting" not in err


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("train.micro_batch_size=1000000000", "for one micro-batch of 1000000000 x 16 tokens"),
        ("model.width=100000000", "for its parameters, gradients and moments"),
    ],
)
def test_what_no_rank_has_memory_for_is_refused_before_any_starts(run: Run, asked: str, named: str) -> None:
    status, _, err = run("nano.toml", "parallel.tp=2", asked)
    assert status == 2
    assert named in err
    assert "starting" not in err
    assert not Path("runs").exists()


def test_on_one_rank_the_receipt_says_that_there_is_nothing_to_overlap(run: Run) -> None:
    _, out, err = run("nano.toml", "overlap=full")
    note = "there is nothing to overlap on one rank (parallel.tp = 1)"
    assert f"overlap = full: {note}" in err
    receipt = json.loads(Path(json.loads(out)["receipt"]).read_text())
    assert receipt == {"asked": "full", "note": note, "num_dropped": 0, "lines": []}


def test_without_a_wish_one_rank_has_no_receipt(run: Run) -> None:
    _, out, err = run("nano.toml")
    assert json.loads(out)["receipt"] is None
    assert "overlap" not in err


def test_the_same_command_goes_on_where_the_run_was(run: Run) -> None:
    run("nano.toml")
    status, out, _ = run("nano.toml", "train.steps=3")
    assert status == 0
    assert json.loads(out)["step"] == 3
    assert json.loads(out)["resumed_from"].endswith("step-00000002")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.paths=absent.txt"], "error: data.paths: absent.txt: no such file or folder"),
        (["data.paths=short.npy"], "error: data: the corpus has 16 tokens, and one sequence needs 17"),
        (["data.paths=large.npy"], "error: large.npy: has token id 300, and the model has model.vocab_size = 257"),
        (["data.paths=nano.toml"], "error: nano.toml: is not a token file"),
        (["data.kind=text", "data.paths=nano.toml"], "tokenizer: is required"),
        (
            ["data.kind=text", "data.paths=nano.toml", "data.tokenizer=no.json"],
            "error: data.tokenizer: no.json: no such file",
        ),
        (["train.steps=many"], "train.steps"),
        (["train.resume=must"], 'error: train.resume = "must": there is no checkpoint in runs/nano/checkpoints'),
        (["model.num_kv_heads=3"], "num_kv_heads"),
    ],
)
def test_bad_input_is_one_message_and_status_2(run: Run, overrides: list[str], message: str) -> None:
    np.save("short.npy", np.arange(16))
    np.save("large.npy", np.full(100, 300))
    status, out, err = run("nano.toml", *overrides)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert not Path("runs/nano/checkpoints").exists()


def test_a_vocabulary_larger_than_the_models_is_refused(run: Run, tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path)
    overrides = ("data.kind=text", "data.paths=nano.toml", f"data.tokenizer={tokenizer}")
    assert run("nano.toml", *overrides)[0] == 0
    status, _, err = run("nano.toml", *overrides, "model.vocab_size=256")
    assert status == 2
    assert "hint: set model.vocab_size = 257" in err


def test_a_truncated_checkpoint_is_one_message_and_status_2(run: Run) -> None:
    run("nano.toml")
    (file,) = Path("runs/nano/checkpoints/step-00000002").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    status, out, err = run("nano.toml", "train.steps=3")
    assert (status, out) == (2, "")
    assert f"step-00000002: is damaged: {file.name} has 100 bytes of" in err
    assert err.endswith(
        'hint: delete the folder, or set train.resume = "last_good", to go on from the checkpoint before it\n'
    )


def test_a_world_that_is_not_the_mesh_is_refused_once_before_any_process_group(run: Run) -> None:
    """Both ranks find it; one of a host says it, and neither waits for the other."""
    status, out, err = run("nano.toml", RANK="0", LOCAL_RANK="0", **LAUNCHED)
    assert (status, out) == (2, "")
    assert err.startswith("error: torchrun started 2 ranks, but the mesh tp=1 needs 1")
    assert run("nano.toml", RANK="1", LOCAL_RANK="1", **LAUNCHED) == (2, "", "")
    assert not dist.is_initialized()


def test_slurm_tasks_that_are_not_the_mesh_are_refused(run: Run) -> None:
    environment = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "node[1-2]"}
    status, _, err = run("nano.toml", "parallel.tp=2", **environment)
    assert status == 2
    assert "slurm started 3 ranks, but the mesh tp=2 needs 2" in err
