"""`plait train model.path=DIR`: the weights of a Hugging Face directory, trained further."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.index import Index
from plait.cli.main import main
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.load import load_training_config
from plait.config.run import FineTuneConfig
from plait.errors import CheckpointError
from plait.hf.directory.source import take_part
from plait.hf.load import list_stored
from plait.parallel.apply import ownership_of
from plait.parallel.shard import gather_tensor
from plait.sharding import MeshShape
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import Summary, build_trainer, train
from plait.train.state import list_tensors, resume
from tests.support.hf_models import CONFIGS, save_hf_model
from tests.support.smollm2 import smollm2_folder
from tests.support.training import read_losses, save_tokens, stop_during

Ranks = Callable[[int], LocalRanks]

REORDERED = 1e-4
"""Relative, of losses, gradient norms and gradients in float32: sums of some thousand addends in another order."""


def _build_run(folder: Path, model: Path, name: str = "run", *overrides: str) -> FineTuneConfig:
    """Six steps of four sequences of 16 tokens in float32, as the command would load them."""
    if not (folder / "tokens.npy").exists():
        save_tokens(folder)
    file = folder / "run.toml"
    file.write_text(
        f'name = "{name}"\nout_dir = "{folder / "runs"}"\nseed = 11\n[model]\npath = "{model}"\n'
        f'[precision]\ncompute = "float32"\n[data]\nkind = "tokens"\npaths = ["{folder / "tokens.npy"}"]\n'
        "[train]\nsteps = 6\nseq_len = 16\nmicro_batch_size = 4\nlearning_rate = 0.01\ncheck_replicas_every = 2\n"
    )
    run = load_training_config(str(file), overrides)
    assert isinstance(run, FineTuneConfig)
    return run


def _train(run: FineTuneConfig, stop_at: int | None = None) -> Summary:
    mesh = build_mesh(run.parallel.mesh_shape)
    if stop_at is None or mesh.rank:
        return train(run, mesh)
    with stop_during(stop_at):
        return train(run, mesh)


def _step(run: FineTuneConfig, batch: MicroBatch) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, gradient norm and whole gradients, by their names in a directory, of one step."""
    mesh = build_mesh(run.parallel.mesh_shape)
    trainer = build_trainer(run, mesh)
    result = trainer.step([batch], 0.0)
    ownership, gradients = ownership_of(trainer.model), {}
    for fqn, stored in list_stored(trainer.model).items():
        grad = trainer.model.get_parameter(fqn).grad
        assert grad is not None, fqn
        whole = gradients.setdefault(stored.name, torch.full(stored.shape, torch.nan))
        take_part(whole, stored).copy_(gather_tensor(grad, ownership[fqn], mesh))
    return result.loss, result.grad_norm, gradients


def _step_unsharded(run: FineTuneConfig, batch: MicroBatch) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The same by transformers alone, in float64, with its own loss; norm before it is clipped, gradients after."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float64).train()
    labels = torch.cat([batch.tokens[:, :1], batch.targets.view_as(batch.tokens)], dim=1)
    logits = model(batch.tokens).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    scale = min(1.0, run.train.max_grad_norm / norm)
    return loss.item(), norm, {name: grad * scale for name, grad in grads.items()}


def _draw_batch(vocab_size: int, shape: tuple[int, int] = (2, 16)) -> MicroBatch:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(0, vocab_size, (shape[0], shape[1] + 1), generator=generator)
    return MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].flatten(), 0)


def _check_step(ranks: Ranks, run: FineTuneConfig, batch: MicroBatch) -> None:
    loss, norm, gradients = _step_unsharded(run, batch)
    for found in ranks(run.parallel.tp).call(_step, run=run, batch=batch):
        assert found[0] == pytest.approx(loss, rel=REORDERED)
        assert found[1] == pytest.approx(norm, rel=REORDERED)
        assert found[2].keys() == gradients.keys()
        for name, grad in gradients.items():
            assert (found[2][name] - grad).norm() <= REORDERED * grad.norm() + 1e-9 * norm, name


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_of_a_step_are_those_of_the_unsharded_model(
    ranks: Ranks, tmp_path: Path, name: str, tp: int, sequence_parallel: str
) -> None:
    overrides = [f"parallel.tp={tp}", f"parallel.sequence_parallel={sequence_parallel}"]
    run = _build_run(tmp_path, save_hf_model(tmp_path / "model", name), "run", *overrides)
    _check_step(ranks, run, _draw_batch(67))


def test_loss_and_gradients_of_a_step_with_real_weights(ranks: Ranks, tmp_path: Path) -> None:
    run = _build_run(tmp_path, smollm2_folder(), "run", "parallel.tp=2", "overlap=full")
    _check_step(ranks, run, _draw_batch(49_152, (1, 48)))


def _numbers(run: FineTuneConfig) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_a_run_does_not_depend_on_the_mesh_nor_on_being_resumed_on_another(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """Packed and transposed linears are whole on one rank and several on more, and go on from each other."""
    model = save_hf_model(tmp_path / "model", name)
    whole = _build_run(tmp_path, model, "whole")
    train(whole, build_mesh(MeshShape()))
    losses = _numbers(whole)
    assert losses[0] > losses[-2]
    for shape, then in (((1, 1), (1, 3)), ((1, 2), (1, 1)), ((2, 2), (1, 3))):
        name = f"dp{shape[0]}-tp{shape[1]}"
        first, second = (
            _build_run(
                tmp_path, model, name, f"parallel.dp={dp}", f"parallel.tp={tp}", f"train.micro_batch_size={4 // dp}"
            )
            for dp, tp in (shape, then)
        )
        (stopped, *_) = ranks(shape[0] * shape[1]).call(_train, run=first, stop_at=3)
        assert (stopped.step, stopped.was_stopped) == (3, True)
        (done, *_) = ranks(then[0] * then[1]).call(_train, run=second)
        assert (done.step, done.resumed_from) == (6, stopped.checkpoint)
        assert _numbers(second) == pytest.approx(losses, rel=5 * REORDERED)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    train(_build_run(tmp_path, save_hf_model(tmp_path / "a", "llama")), build_mesh(MeshShape()))
    with pytest.raises(CheckpointError, match=r"model.model_type: 'llama' in the checkpoint, 'qwen2' now"):
        train(_build_run(tmp_path, save_hf_model(tmp_path / "b", "qwen2")), build_mesh(MeshShape()))


def test_the_directory_may_have_moved_when_a_run_goes_on(tmp_path: Path) -> None:
    model = save_hf_model(tmp_path / "a", "llama")
    train(_build_run(tmp_path, model, "run", "train.steps=1"), build_mesh(MeshShape()))
    moved = model.rename(tmp_path / "b")
    assert train(_build_run(tmp_path, moved, "run", "train.steps=2"), build_mesh(MeshShape())).step == 2


def _train_one_layer(run: FineTuneConfig) -> tuple[int, list[str], list[str]]:
    """Two steps of one layer, the others frozen: elements of all gradients, what a checkpoint holds, what moved."""
    from unittest.mock import patch

    from plait.train import build

    def freeze(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        for name, param in model.named_parameters():
            param.requires_grad_(".1." in name)
        return model

    load = build.load_pretrained
    mesh = build_mesh(run.parallel.mesh_shape)
    with patch.object(build, "load_pretrained", freeze):
        summary = train(run, mesh)
        trainer = build_trainer(run, mesh)
        fresh = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
        index = Index.from_folder(summary.checkpoint)
        resume(trainer, summary.checkpoint, index.state["identity"])
        moved = [name for name, param in trainer.model.named_parameters() if not torch.equal(param, fresh[name])]
        assert {name: owned.tensor.dtype for name, owned in list_tensors(trainer).items()} != {}
        return trainer.gradients.flat.numel(), sorted(index.tensors), moved


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_is_frozen_has_no_gradient_no_moments_and_is_in_no_checkpoint(
    ranks: Ranks, tmp_path: Path, compute: str
) -> None:
    model = save_hf_model(tmp_path / "model", "llama")
    run = _build_run(tmp_path, model, "run", "parallel.tp=2", "train.steps=2", f"precision.compute={compute}")
    for num_gradients, saved, moved in ranks(2).call(_train_one_layer, run=run):
        assert moved
        assert all(".1." in name for name in (*saved, *moved))
        assert len(saved) == 3 * 9
        assert num_gradients < 5000
    (model / "model.safetensors").unlink()
    save_hf_model(model, "llama", seed=1)
    with pytest.raises(CheckpointError, match=r"model.weights: '\w+' in the checkpoint, '\w+' now"):
        ranks(2).call(_train_one_layer, run=run.model_copy(update={"train": run.train.model_copy(update={"steps": 3})}))


def _run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str, str]:
    capsys.readouterr()  # what transformers said when it saved
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_the_command_trains_a_directory_and_convert_writes_it_for_everybody(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model = save_hf_model(tmp_path / "model", "gpt2")
    (model / "tokenizer_config.json").write_text("{}")
    _build_run(tmp_path, model)
    status, out, err = _run_command(capsys, "train", "run.toml", "train.steps=3")
    assert status == 0, err
    checkpoint = json.loads(out)["checkpoint"]
    status, out, err = _run_command(capsys, "convert", checkpoint, "tuned")
    assert status == 0, err
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "tuned"))
    trainer = build_trainer(_build_run(tmp_path, model), build_mesh(MeshShape()))
    resume(trainer, Path(checkpoint), Index.from_folder(Path(checkpoint)).state["identity"])
    for name, param in trainer.model.named_parameters():
        assert torch.equal(after.state_dict()[name], param), name
        assert not torch.equal(before.state_dict()[name], param), name
    assert (tmp_path / "tuned" / "tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    ("damage", "message"),
    [("config.json", "has no config.json"), ("model.safetensors", "has no weights")],
)
def test_a_directory_that_cannot_be_is_found_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("plait.cli.train.LocalRanks", None)
    model = save_hf_model(tmp_path / "model", "llama")
    _build_run(tmp_path, model)
    (model / damage).unlink()
    status, out, err = _run_command(capsys, "train", "run.toml", "parallel.tp=2")
    assert (status, out) == (2, "")
    assert message in err
