"""`plait train model.path=DIR model.lora.rank=R`: adapters are trained, saved and written, their model is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.read import Checkpoint
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.load import load_training_config
from plait.config.run import FineTuneConfig
from plait.errors import ConfigError
from plait.hf.convert.run import Request, convert
from plait.hf.lora.files import save_adapter
from plait.hf.lora.layers import is_adapter
from plait.sharding import MeshShape
from plait.train.build import build_trainer, check_model
from plait.train.loop import Summary, train
from tests.support.hf_models import save_hf_model
from tests.support.training import read_losses, save_tokens, stop_during

Ranks = Callable[[int], LocalRanks]

REORDERED = 5e-4
"""Relative, of losses and gradient norms in float32: sums in another order, through six steps."""


def _build_run(folder: Path, model: Path, name: str, *overrides: str) -> FineTuneConfig:
    if not (folder / "tokens.npy").exists():
        save_tokens(folder)
    file = folder / "run.toml"
    file.write_text(
        f'name = "{name}"\nout_dir = "{folder / "runs"}"\nseed = 11\n[model]\npath = "{model}"\n'
        f'[precision]\ncompute = "float32"\n[data]\nkind = "tokens"\npaths = ["{folder / "tokens.npy"}"]\n'
        "[train]\nsteps = 6\nseq_len = 16\nmicro_batch_size = 4\nlearning_rate = 0.003\ncheck_replicas_every = 2\n"
    )
    lora = () if any("model.lora" in each for each in overrides) else ("model.lora.rank=4", "model.lora.dropout=0.1")
    run = load_training_config(str(file), [*lora, *overrides])
    assert isinstance(run, FineTuneConfig)
    return run


def _train(run: FineTuneConfig, stop_at: int | None = None) -> Summary:
    mesh = build_mesh(run.parallel.mesh_shape)
    if stop_at is None or mesh.rank:
        return train(run, mesh)
    with stop_during(stop_at):
        return train(run, mesh)


def _numbers(run: FineTuneConfig) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]  # type: ignore[arg-type]


def _convert(source: Path, target: Path, **options: Any) -> Path:
    convert(Request(source, target, **options), lambda _: lambda _: None)
    return target


def _save_fresh(run: FineTuneConfig, target: Path) -> None:
    mesh = build_mesh(run.parallel.mesh_shape)
    save_adapter(build_trainer(run, mesh).model, target, mesh, base=run.model.path)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_run_does_not_depend_on_the_mesh_nor_on_being_resumed_on_another(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    model = save_hf_model(tmp_path / "model", name)
    whole = _build_run(tmp_path, model, "whole")
    done = train(whole, build_mesh(MeshShape()))
    losses = _numbers(whole)
    assert len(set(losses)) == 12
    saved = Checkpoint.from_folder(done.checkpoint).names
    assert all(map(is_adapter, saved))
    for first, then in ((1, 3), (2, 1)):
        run = [_build_run(tmp_path, model, f"tp{first}", f"parallel.tp={tp}") for tp in (first, then)]
        (stopped, *_) = ranks(first).call(_train, run=run[0], stop_at=3)
        (done, *_) = ranks(then).call(_train, run=run[1])
        assert (done.step, done.resumed_from) == (6, stopped.checkpoint)
        assert _numbers(run[1]) == pytest.approx(losses, rel=REORDERED)
        assert Checkpoint.from_folder(done.checkpoint).names == saved


@pytest.mark.parametrize(("name", "axis"), [("llama", "tp"), ("gpt2", "tp"), ("llama", "dp_shard")])
def test_blocks_computed_again_give_the_same_bits(ranks: Ranks, tmp_path: Path, name: str, axis: str) -> None:
    """Of adapters with dropout, whose masks are drawn a second time."""
    model = save_hf_model(tmp_path / "model", name)
    told = []
    for recompute in ("none", "full"):
        run = _build_run(tmp_path, model, recompute, f"train.recompute={recompute}", f"parallel.{axis}=2")
        ranks(2).call(_train, run=run)
        told.append(_numbers(run))
    assert len(told[0]) == 12
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fresh_adapters_are_the_same_at_every_degree_and_begin_as_those_of_peft(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    from safetensors.torch import load_file

    model = save_hf_model(tmp_path / "model", name)
    files = []
    for tp in (1, 2, 3):
        ranks(tp).call(
            _save_fresh, run=_build_run(tmp_path, model, "run", f"parallel.tp={tp}"), target=tmp_path / f"{tp}"
        )
        files.append(load_file(tmp_path / f"{tp}" / "adapter_model.safetensors"))
    for key, value in files[0].items():
        assert torch.equal(files[1][key], value), key
        assert torch.equal(files[2][key], value), key
        if "lora_B" in key:
            assert not value.any(), key
        else:
            bound = value.shape[1] ** -0.5
            assert 0.8 * bound < value.abs().max() < bound, key


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_peft_reads_what_was_trained_and_it_is_merged_and_trained_further(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    import peft
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = save_hf_model(tmp_path / "model", name)
    run = _build_run(tmp_path, model, "run", "parallel.tp=2", "train.steps=2", "train.learning_rate=0.1")
    (done, *_) = ranks(2).call(_train, run=run)
    adapter = _convert(done.checkpoint, tmp_path / "adapter")
    again = _convert(_convert(done.checkpoint, tmp_path / "cut", form="plait", tp=3), tmp_path / "again")
    held = load_file(adapter / "adapter_model.safetensors")
    tuned = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter))
    read = {key.replace(".default", ""): value for key, value in tuned.state_dict().items() if "lora_" in key}
    assert read.keys() == held.keys() == load_file(again / "adapter_model.safetensors").keys()
    for key, value in load_file(again / "adapter_model.safetensors").items():
        assert torch.equal(held[key], value), key
        assert torch.equal(read[key], value), key
        assert value.any(), key
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    merged = AutoModelForCausalLM.from_pretrained(_convert(done.checkpoint, tmp_path / "merged", is_merged=True))
    ids = torch.arange(16)[None]
    logits = tuned(ids).logits
    assert (logits - AutoModelForCausalLM.from_pretrained(model)(ids).logits).abs().max() > 0.01
    torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)
    further = _build_run(tmp_path, model, "further", f"model.lora.path={adapter}", "parallel.tp=3")
    ranks(3).call(_save_fresh, run=further, target=tmp_path / "same")
    for key, value in load_file(tmp_path / "same" / "adapter_model.safetensors").items():
        assert torch.equal(held[key], value), key


def test_what_cannot_be_is_said_before_any_rank_starts(tmp_path: Path) -> None:
    model = save_hf_model(tmp_path / "model", "llama")
    for targets, message in ((["nothing"], "model.lora: peft does not take it"), (["lm_head"], "lm_head has adapters")):
        run = _build_run(
            tmp_path, model, "run", "model.lora.rank=2", f"model.lora.target_modules={json.dumps(targets)}"
        )
        with pytest.raises(ConfigError, match=message):
            check_model(run)
    with pytest.raises(ConfigError, match="nothing to merge"):
        _convert(model, tmp_path / "merged", form="hf", is_merged=True)
