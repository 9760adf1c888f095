"""`plait train model.path=DIR`: the weights of a Hugging Face directory, trained further."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from plait.checkpoint.index import Index
from plait.checkpoint.read import Checkpoint
from plait.cli.main import main
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.load import load_training_config
from plait.config.run import FineTuneConfig
from plait.errors import CheckpointError, ConfigError
from plait.hf.directory.source import take_part
from plait.hf.load import list_stored
from plait.parallel.apply import ownership_of
from plait.parallel.block.recompute import Again
from plait.parallel.shard import shard_tensor
from plait.sharding import MeshShape
from plait.train.corpus.tokenize import check_data
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import Summary, build_trainer, train
from plait.train.state import list_tensors, resume
from tests.support.byte_tokenizer import save_byte_tokenizer
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
        "[train]\nsteps = 6\nseq_len = 16\nmicro_batch_size = 4\nlearning_rate = 0.003\ncheck_replicas_every = 2\n"
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


def _step(run: FineTuneConfig, batch: MicroBatch, expected: Path) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient norm and, by FQN, how far this rank's gradients are from those in `expected`, relative to it."""
    mesh = build_mesh(run.parallel.mesh_shape)
    trainer = build_trainer(run, mesh)
    result = trainer.step([batch], 0.0)
    stored, ownership, errors = list_stored(trainer.model), ownership_of(trainer.model), {}
    with safe_open(expected, framework="pt") as file:
        assert set(file.keys()) == {each.name for each in stored.values()}
        for fqn, each in stored.items():
            grad = trainer.model.get_parameter(fqn).grad
            assert grad is not None, fqn
            whole = take_part(file.get_tensor(each.name), each)
            own = shard_tensor(whole, ownership[fqn], mesh.tp.rank)
            # That of a key's bias is zero but for rounding, so it is measured against all gradients, clipped to 1.
            errors[fqn] = ((own - grad).norm() / whole.norm().clamp(min=1e-3)).item()
    return result.loss, result.grad_norm, errors


def _step_unsharded(run: FineTuneConfig, batch: MicroBatch, target: Path) -> tuple[float, float]:
    """Loss and norm by transformers alone, in float64; the gradients, clipped as in training, go to a file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float64).train()
    logits = model(batch.tokens).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    scale = min(1.0, run.train.max_grad_norm / norm)
    save_file({name: grad * scale for name, grad in grads.items()}, target)
    return loss.item(), norm


def _draw_batch(vocab_size: int, shape: tuple[int, int] = (2, 16)) -> MicroBatch:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(0, vocab_size, (shape[0], shape[1] + 1), generator=generator)
    return MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].flatten(), 0)


def _check_step(ranks: Ranks, run: FineTuneConfig, batch: MicroBatch, expected: Path) -> None:
    loss, norm = _step_unsharded(run, batch, expected)
    for found_loss, found_norm, errors in ranks(run.parallel.tp).call(_step, run=run, batch=batch, expected=expected):
        assert found_loss == pytest.approx(loss, rel=REORDERED)
        assert found_norm == pytest.approx(norm, rel=REORDERED)
        assert {fqn: error for fqn, error in errors.items() if not error < REORDERED} == {}


def _keep_gradients(run: FineTuneConfig, batch: MicroBatch) -> tuple[bool, list[torch.Tensor]]:
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    trainer.step([batch], 0.0)
    grads = [param.grad for param in trainer.model.parameters() if param.grad is not None]
    return any(isinstance(block.forward, Again) for block in trainer.model.modules()), grads


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_blocks_computed_again_give_the_same_bits(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    fields = {"resid_pdrop": 0.3} if kind == "gpt2" else {}
    model, batch = save_hf_model(tmp_path / "model", kind, **fields), _draw_batch(67)
    found = {}
    for recompute in ("none", "full"):
        run = _build_run(tmp_path, model, "run", "parallel.tp=2", f"train.recompute={recompute}")
        found[recompute] = ranks(2).call(_keep_gradients, run=run, batch=batch)
    for (is_plain, plain), (is_again, again) in zip(found["none"], found["full"], strict=True):
        assert (is_plain, is_again) == (False, True)
        assert all(torch.equal(mine, other) for mine, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_of_a_step_are_those_of_the_unsharded_model(
    ranks: Ranks, tmp_path: Path, name: str, tp: int, sequence_parallel: str
) -> None:
    overrides = [f"parallel.tp={tp}", f"parallel.sequence_parallel={sequence_parallel}"]
    run = _build_run(tmp_path, save_hf_model(tmp_path / "model", name), "run", *overrides)
    _check_step(ranks, run, _draw_batch(67), tmp_path / "expected")


@pytest.mark.timeout(900)
def test_loss_and_gradients_of_a_step_with_real_weights(ranks: Ranks, tmp_path: Path) -> None:
    run = _build_run(tmp_path, smollm2_folder(), "run", "parallel.tp=2", "overlap=full", "train.seq_len=32")
    _check_step(ranks, run, _draw_batch(49_152, (1, 32)), tmp_path / "expected")


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
    assert len(set(losses)) == 12
    for shape, then in (((1, 1), (1, 3)), ((1, 2), (1, 1)), ((2, 2), (1, 3))):
        name = f"dp{shape[0]}-tp{shape[1]}"
        first, second = (
            _build_run(
                tmp_path, model, name, f"parallel.dp_replicate={dp}", f"parallel.tp={tp}", f"train.micro_batch_size={4 // dp}"
            )
            for dp, tp in (shape, then)
        )
        (stopped, *_) = ranks(shape[0] * shape[1]).call(_train, run=first, stop_at=3)
        assert (stopped.step, stopped.was_stopped) == (3, True)
        (done, *_) = ranks(then[0] * then[1]).call(_train, run=second)
        assert (done.step, done.resumed_from) == (6, stopped.checkpoint)
        assert _numbers(second) == pytest.approx(losses, rel=5 * REORDERED)


def test_what_dropout_drops_does_not_depend_on_the_mesh(ranks: Ranks, tmp_path: Path) -> None:
    model = save_hf_model(tmp_path / "model", "gpt2", resid_pdrop=0.3, embd_pdrop=0.2)
    whole = _build_run(tmp_path, model, "whole", "train.steps=2")
    train(whole, build_mesh(MeshShape()))
    cut = _build_run(tmp_path, model, "cut", "train.steps=2", "parallel.tp=3")
    ranks(3).call(_train, run=cut)
    assert _numbers(cut) == pytest.approx(_numbers(whole), rel=REORDERED)
    other = _build_run(tmp_path, model, "other", "train.steps=2", "seed=12")
    train(other, build_mesh(MeshShape()))
    assert _numbers(other) != pytest.approx(_numbers(whole), rel=1e-2)


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
        saved = Checkpoint.from_folder(summary.checkpoint)
        resume(trainer, summary.checkpoint, saved.index.state["identity"])
        moved = [name for name, param in trainer.model.named_parameters() if not torch.equal(param, fresh[name])]
        assert {name: owned.tensor.dtype for name, owned in list_tensors(trainer).items()} != {}
        return trainer.gradients.flat.numel(), sorted(saved.names), moved


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


def test_text_is_turned_into_tokens_by_the_tokenizer_of_the_directory(tmp_path: Path) -> None:
    model = save_hf_model(tmp_path / "model", "llama", vocab_size=257)
    save_byte_tokenizer(model)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 20)
    run = _build_run(tmp_path, model, "run", "data.kind=text", f"data.paths={tmp_path / 'text.txt'}", "train.steps=2")
    assert train(run, build_mesh(MeshShape())).step == 2
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"data.tokenizer: .*model/tokenizer.json: no such file"):
        check_data(run)


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
