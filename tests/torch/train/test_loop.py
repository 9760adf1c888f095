import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from plait.checkpoint.index import Index
from plait.checkpoint.names import list_checkpoints
from plait.checkpoint.save import Save
from plait.comm.mesh import build_mesh
from plait.config.data import DataConfig
from plait.config.model import ModelConfig
from plait.config.run import RunConfig
from plait.errors import CheckpointError, ConfigError, PlaitError
from plait.sharding import MeshShape
from plait.train.claim import claim_folder
from plait.train.loop import build_trainer, train
from plait.train.state import Position, checkpoint_folder, list_tensors, resume
from tests.support.checkpoints import read_tensors
from tests.support.training import GPT, LLAMA, build_run, read_losses, save_tokens, stop_during

MESH = build_mesh(MeshShape())


def _read_tensors(run: RunConfig, checkpoint: Path) -> dict[str, torch.Tensor]:
    trainer = build_trainer(run, MESH)
    resume(trainer, checkpoint, Index.from_folder(checkpoint).state["identity"])
    return {name: owned.tensor for name, owned in list_tensors(trainer).items()}


def test_the_loss_falls(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=30)
    summary = train(run, MESH)
    losses = [loss for _, loss, _ in read_losses(run)]
    assert len(losses) == 30
    assert losses[0] == pytest.approx(4.2, abs=0.1)  # log 67
    assert summary.loss == losses[-1] < 3.5


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt-with-dropout"])
@pytest.mark.parametrize("stopped_at", [2, 5])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, model: ModelConfig, stopped_at: int
) -> None:
    whole = build_run(tmp_path, model=model, name="whole", steps=7, gradient_accumulation=2)
    parts = build_run(tmp_path, model=model, name="parts", steps=7, gradient_accumulation=2)
    expected = train(whole, MESH)
    with stop_during(stopped_at):
        first = train(parts, MESH)
    assert (first.step, first.was_stopped) == (stopped_at, True)
    second = train(parts, MESH)
    assert (second.step, second.resumed_from) == (7, first.checkpoint)
    assert read_losses(parts) == read_losses(whole)
    tensors, other = _read_tensors(parts, second.checkpoint), _read_tensors(whole, expected.checkpoint)
    assert tensors.keys() == other.keys()
    assert all(torch.equal(tensors[name], other[name]) for name in tensors)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=2)
    first = train(run, MESH)
    second = train(run, MESH)
    assert (second.step, second.loss, second.was_stopped) == (2, None, False)
    assert second.checkpoint == second.resumed_from == first.checkpoint
    assert len(read_losses(run)) == 2


def test_checkpoints_are_written_as_often_and_kept_as_long_as_asked(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=7, checkpoint_every=2, keep_checkpoints=2)
    train(run, MESH)
    assert [step for step, _ in list_checkpoints(checkpoint_folder(run))] == [6, 7]


def test_an_interrupted_run_leaves_the_signal_handlers_as_they_were(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(build_run(tmp_path, steps=1), MESH)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_run_does_not_resume_from_that_of_another_model_or_data(tmp_path: Path) -> None:
    train(build_run(tmp_path, steps=1), MESH)
    for run, differing in (
        (
            build_run(tmp_path, steps=2, model=LLAMA.model_copy(update={"norm_eps": 1e-3})),
            "model.norm_eps: 1e-05 in the",
        ),
        (build_run(tmp_path, steps=2, model=GPT), "model.family: 'llama' in the checkpoint, 'gpt' now"),
        (build_run(tmp_path, steps=2, seq_len=8), "train.seq_len: 16 in the checkpoint, 8 now"),
        (build_run(tmp_path, steps=2).model_copy(update={"seed": 5}), "seed: 11 in the checkpoint, 5 now"),
    ):
        with pytest.raises(CheckpointError, match="belongs to another run") as caught:
            train(run, MESH)
        assert differing in caught.value.message
        assert caught.value.hint == "give this run another name, or go back to the config of the checkpoint"


def test_a_run_does_not_resume_on_other_data_of_the_same_length(tmp_path: Path) -> None:
    train(build_run(tmp_path, steps=1), MESH)
    save_tokens(tmp_path, seed=8)
    with pytest.raises(CheckpointError, match=r"data: '2001 tokens, \w+' in the checkpoint, '2001 tokens, \w+' now"):
        train(build_run(tmp_path, steps=2), MESH)


def test_a_run_may_resume_with_another_batch_and_schedule(tmp_path: Path) -> None:
    train(build_run(tmp_path, steps=2), MESH)
    summary = train(build_run(tmp_path, steps=3, micro_batch_size=2, learning_rate=0.1), MESH)
    assert summary.step == 3


def test_a_damaged_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    summary = train(build_run(tmp_path, steps=2), MESH)
    (file,) = summary.checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0.distcp has 1000 bytes of \d+"):
        train(build_run(tmp_path, steps=3), MESH)


def test_the_last_undamaged_checkpoint_is_used_if_asked_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = build_run(tmp_path, name="whole", steps=6)
    train(whole, MESH)
    run = build_run(tmp_path, steps=6, checkpoint_every=2, keep_checkpoints=0)
    directory = train(run, MESH).checkpoint.parent
    file = directory / "step-00000006" / "__0_0.distcp"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    (directory / "step-00000004" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="step-00000006: is damaged: __0_0.distcp does not hold") as caught:
        train(run, MESH)
    assert 'train.resume = "last_good"' in str(caught.value.hint)
    capsys.readouterr()
    summary = train(build_run(tmp_path, steps=6, resume="last_good"), MESH)
    assert (summary.step, summary.resumed_from) == (6, directory / "step-00000002")
    said = capsys.readouterr().err
    assert "passed over: " in said
    for problem in ("step-00000006: is damaged: __0_0.distcp does not hold", "step-00000004: is damaged: .metadata is"):
        assert problem in " ".join(said.split())
    assert read_losses(run) == read_losses(whole)
    assert sorted(path.name for path in directory.iterdir()) == [
        "step-00000002",
        "step-00000004.damaged",
        "step-00000006",
        "step-00000006.damaged",
    ]


def test_without_an_undamaged_checkpoint_nothing_begins_anew(tmp_path: Path) -> None:
    summary = train(build_run(tmp_path, steps=1), MESH)
    (summary.checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is undamaged\n  - .*__0_0.distcp is missing"):
        train(build_run(tmp_path, steps=2, resume="last_good"), MESH)
    assert [path.name for path in summary.checkpoint.parent.iterdir()] == ["step-00000001"]
    assert train(build_run(tmp_path, name="new", steps=1, resume="last_good"), MESH).resumed_from is None


def test_a_run_that_saves_while_it_trains_is_the_same_run(tmp_path: Path) -> None:
    whole = train(build_run(tmp_path, name="whole", steps=5), MESH)
    run = build_run(tmp_path, steps=5, checkpoint_every=1, keep_checkpoints=2, async_checkpoint=True)
    with stop_during(3):
        assert train(run, MESH).step == 3
    summary = train(run, MESH)
    assert sorted(path.name for path in summary.checkpoint.parent.iterdir()) == ["step-00000004", "step-00000005"]
    expected, found = read_tensors(whole.checkpoint), read_tensors(summary.checkpoint)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_save_that_fails_while_the_run_goes_on_stops_it(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=50, checkpoint_every=2, async_checkpoint=True)
    error = CheckpointError("disk: is full")
    with patch.object(Save, "publish", side_effect=error), pytest.raises(CheckpointError, match="disk: is full"):
        train(run, MESH)
    assert 2 < len(read_losses(run)) < 50
    assert list(checkpoint_folder(run).iterdir()) == []


def test_a_save_under_way_is_finished_when_training_diverges(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=9, checkpoint_every=1, async_checkpoint=True, learning_rate=1e38)
    with pytest.raises(PlaitError, match="training diverged"):
        train(run.model_copy(update={"train": run.train.model_copy(update={"max_grad_norm": 0.0})}), MESH)
    assert [step for step, _ in list_checkpoints(checkpoint_folder(run))] == [1]


@pytest.mark.parametrize("value", [-4, 1.5, "6", None, 10**30], ids=repr)
def test_a_position_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    summary = train(build_run(tmp_path, steps=1), MESH)
    index = Index.from_folder(summary.checkpoint)
    index.state["position"]["step"] = value
    (summary.checkpoint / "index.json").write_text(index.to_json())
    with pytest.raises(CheckpointError, match="step-00000001: is not a checkpoint of `plait train`"):
        train(build_run(tmp_path, steps=2), MESH)


@pytest.mark.parametrize("identity", [[1], "seed", None], ids=repr)
def test_what_does_not_tell_one_run_from_another_is_refused(tmp_path: Path, identity: object) -> None:
    summary = train(build_run(tmp_path, steps=1), MESH)
    index = Index.from_folder(summary.checkpoint)
    changed = replace(index, state={**index.state, "identity": identity})
    (summary.checkpoint / "index.json").write_text(changed.to_json())
    with pytest.raises(CheckpointError, match="step-00000001: is not a checkpoint of `plait train`"):
        train(build_run(tmp_path, steps=2), MESH)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """It would be trained from there, up to a save under a name that is taken."""
    folder = train(build_run(tmp_path, steps=1), MESH).checkpoint
    folder.rename(folder.with_name("step-00000003"))
    with pytest.raises(CheckpointError, match="step-00000003: was saved after step 1, and has another name"):
        train(build_run(tmp_path, steps=4), MESH)


def test_a_corpus_of_nothing_but_ends_of_documents_is_an_error_and_saves_nothing(tmp_path: Path) -> None:
    """A loss of 0 would look like a model that has learnt everything."""
    run = build_run(tmp_path, steps=2)
    np.save(tmp_path / "tokens.npy", np.full(2001, 3, dtype=np.uint16))
    data = DataConfig.model_validate(run.data.model_dump() | {"mask_documents": True, "end_of_text_id": 3})
    with pytest.raises(PlaitError, match="step 1 has nothing to learn from"):
        train(run.model_copy(update={"data": data}), MESH)
    assert list_checkpoints(checkpoint_folder(run)) == []


def test_two_runs_do_not_write_to_one_folder_at_once(tmp_path: Path) -> None:
    run = build_run(tmp_path, steps=1)
    with claim_folder(tmp_path / "runs" / "run", MESH):
        with pytest.raises(ConfigError, match="runs/run: another run is writing there"):
            train(run, MESH)
        train(build_run(tmp_path, name="other", steps=1), MESH)
    assert train(run, MESH).step == 1


def test_resume_must_and_never_are_honoured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'train.resume = "must": there is no checkpoint in'):
        train(build_run(tmp_path, resume="must"), MESH)
    train(build_run(tmp_path, steps=1, resume="never"), MESH)
    with pytest.raises(
        ConfigError, match=r'train.resume = "never": .* has checkpoints already, the newest step-00000001'
    ):
        train(build_run(tmp_path, resume="never"), MESH)


def test_the_position_is_one_number_of_sequences(tmp_path: Path) -> None:
    run = build_run(tmp_path, parallel={"dp_replicate": 3}, micro_batch_size=2, gradient_accumulation=5)
    assert Position(4, 100).advance(run) == Position(5, 130)
