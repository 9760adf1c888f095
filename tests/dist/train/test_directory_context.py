"""A Hugging Face directory is trained over context ranks as on one: losses and gradient norms of whole runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli.main import main
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.load import load_training_config
from plait.config.run import FineTuneConfig
from plait.errors import ConfigError
from plait.sharding import MeshShape
from plait.train.build import build_trainer
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import train
from tests.support.hf_models import save_hf_model
from tests.support.training import read_losses, save_tokens, stop_during

Ranks = Callable[[int], LocalRanks]

REORDERED = 5e-4
"""Relative, of losses and gradient norms in float32: sums in another order, through six steps."""

MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ()),
    "mistral": ("llama", {"model_type": "mistral", "sliding_window": 5}, ()),
    "gpt2": ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.2}, ()),
    "lora": ("llama", {}, ("model.lora.rank=4", "model.lora.dropout=0.1")),
}
"""The kind of test model, fields of its config, overrides of the run: with dropout, whose masks follow the tokens."""


def build_run(folder: Path, case: str, name: str, *overrides: str) -> FineTuneConfig:
    kind, fields, own = MODELS[case]
    model = folder / case
    if not model.exists():
        save_tokens(folder)
        save_hf_model(model, kind, **fields)
    file = folder / "run.toml"
    file.write_text(
        f'name = "{name}"\nout_dir = "{folder / "runs"}"\nseed = 11\n[model]\npath = "{model}"\n'
        f'[precision]\ncompute = "float32"\n[data]\nkind = "tokens"\npaths = ["{folder / "tokens.npy"}"]\n'
        "[train]\nsteps = 6\nseq_len = 16\nmicro_batch_size = 4\nlearning_rate = 0.003\ncheck_replicas_every = 2\n"
    )
    run = load_training_config(str(file), [*own, *overrides])
    assert isinstance(run, FineTuneConfig)
    return run


def run_on(run: FineTuneConfig, stop_at: int | None = None) -> None:
    mesh = build_mesh(run.parallel.mesh_shape)
    if stop_at is None or mesh.rank:
        train(run, mesh)
        return
    with stop_during(stop_at):
        train(run, mesh)


def read(run: FineTuneConfig) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=MODELS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[float]]:
    """A run of one rank."""
    folder = tmp_path_factory.mktemp("directory")
    run = build_run(folder, request.param, "whole")
    train(run, build_mesh(MeshShape()))
    return folder, request.param, read(run)


MESHES = {
    "cp2": ("parallel.cp=2",),
    "cp3": ("parallel.cp=3", "context.method=all_gather", "context.order=contiguous"),
    "cp2-tp2": ("parallel.cp=2", "parallel.tp=2", "context.method=all_to_all"),
    "cp2-tp2-ar": ("parallel.cp=2", "parallel.tp=2", "parallel.sequence_parallel=false", "train.recompute=full"),
    "cp2-fsdp2": ("parallel.cp=2", "parallel.dp_shard=2", "train.micro_batch_size=2"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_rank(ranks: Ranks, reference: Any, mesh: str) -> None:
    folder, case, expected = reference
    run = build_run(folder, case, mesh, *MESHES[mesh])
    pool = ranks(run.parallel.mesh_shape.world_size)
    if run.parallel.dp_shard > 1 and case == "gpt2":
        with pytest.raises(ConfigError, match="several tensors of the directory in one"):
            pool.call(run_on, run=run)
        return
    pool.call(run_on, run=run)
    assert len(set(expected)) == 12
    assert read(run) == pytest.approx(expected, rel=REORDERED)


def test_a_run_goes_on_over_other_context_ranks(ranks: Ranks, reference: Any) -> None:
    folder, case, expected = reference
    ranks(3).call(run_on, run=build_run(folder, case, "moved", "parallel.cp=3"), stop_at=3)
    run = build_run(folder, case, "moved", "parallel.cp=2", "context.order=contiguous")
    assert len(read(run)) == 6
    ranks(2).call(run_on, run=run)
    assert read(run) == pytest.approx(expected, rel=REORDERED)


def keep_gradients(run: FineTuneConfig) -> list[torch.Tensor]:
    rows = torch.randint(0, 67, (2, 17), generator=torch.Generator().manual_seed(4))
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    trainer.step([MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].flatten(), 0)], 0.0)
    return [param.grad for param in trainer.model.parameters() if param.grad is not None]


@pytest.mark.parametrize("case", ["mistral", "gpt2"])
def test_blocks_computed_again_give_the_same_bits(ranks: Ranks, tmp_path: Path, case: str) -> None:
    found = []
    for recompute in ("none", "full"):
        run = build_run(tmp_path, case, "run", "parallel.cp=2", "parallel.tp=2", f"train.recompute={recompute}")
        found.append(ranks(4).call(keep_gradients, run=run))
    for plain, again in zip(*found, strict=True):
        assert plain
        assert all(torch.equal(mine, other) for mine, other in zip(plain, again, strict=True))


def test_what_cannot_be_cut_is_said_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.cli.train.LocalRanks", None)
    monkeypatch.chdir(tmp_path)
    build_run(tmp_path, "llama", "run")
    model = save_hf_model(tmp_path / "capped", "llama", model_type="gemma2", query_pre_attn_scalar=4)
    capsys.readouterr()  # what transformers said when it saved
    with pytest.raises(SystemExit) as caught:
        main(["train", "run.toml", f"model.path={model}", "parallel.cp=2"])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert "over 2 context ranks" in err
    assert "attn_logit_softcapping = 50.0: squashes scores" in err
