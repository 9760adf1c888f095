"""Runs whose parameters data-parallel ranks share out: the curve of one rank, from any checkpoint, and what moves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.comm import trace
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.load import load_training_config
from plait.config.run import AnyRun
from plait.errors import ConfigError
from plait.parallel.fsdp.local import local_of
from plait.sharding import Kind, MeshShape
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import Summary, build_trainer, train
from tests.support.hf_models import save_hf_model
from tests.support.training import GPT, LLAMA, build_run, read_losses, save_tokens, stop_during

Ranks = Callable[[int], LocalRanks]

REORDERED = 5e-5
"""As in test_training.py."""


def _train(run: AnyRun, stop_at: int | None = None) -> Summary:
    mesh = build_mesh(run.parallel.mesh_shape)
    if stop_at is None or mesh.rank:
        return train(run, mesh)  # type: ignore[arg-type]
    with stop_during(stop_at):
        return train(run, mesh)  # type: ignore[arg-type]


def _numbers(run: AnyRun) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt-with-dropout"])
def test_a_run_goes_on_whether_parameters_are_shared_out_or_not(ranks: Ranks, tmp_path: Path, model: Any) -> None:
    """dp_shard 3, then none, then HSDP with tp: the curve is that of one rank; replicas are checked on the way."""
    whole = build_run(tmp_path, model=model, name="whole", micro_batch_size=12)
    train(whole, build_mesh(MeshShape()))
    meshes: list[dict[str, Any]] = [{"dp_shard": 3}, {"tp": 2}, {"dp_replicate": 2, "dp_shard": 2}]
    for parallel, size, stop_at in zip(meshes, (4, 12, 3), (2, 4, None), strict=True):
        run = build_run(tmp_path, model=model, name="wandering", parallel=parallel, micro_batch_size=size)
        ranks(run.parallel.mesh_shape.world_size).call(_train, run=run, stop_at=stop_at)
    assert _numbers(run) == pytest.approx(_numbers(whole), rel=REORDERED)


def _look(run: AnyRun) -> tuple[int, int, dict[str, int]]:
    """Elements of this rank's masters and of its gradients, and how often a step issues what over dp_shard."""
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))  # type: ignore[arg-type]
    rows = torch.arange(17).repeat(2, 1) + trainer.mesh.dp.rank
    batch = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].flatten(), 0)
    with trace.record() as recorded:
        trainer.step([batch] * run.train.gradient_accumulation, 0.01)
    kinds = [each.kind for each in recorded.collectives if each.axis == "dp_shard" and each.shape != (1,)]
    assert all(master.grad is None for master in trainer.optimizer.masters.values()), "else they are there twice"
    masters = sum(master.numel() for master in trainer.optimizer.masters.values())
    held = sum(local_of(param).numel() for param in trainer.model.parameters())
    assert all(param.is_contiguous() for param in trainer.optimizer.masters.values())
    assert held == masters
    return masters, sum(grad.numel() for grad in trainer.optimizer.list_gradients().values()), {
        str(kind): kinds.count(kind) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    }


@pytest.mark.parametrize(("accumulation", "reshard"), [(1, True), (3, True), (3, False)])
def test_gradients_are_reduced_once_a_step_and_every_rank_keeps_its_share(
    ranks: Ranks, tmp_path: Path, accumulation: int, reshard: bool
) -> None:
    parallel = {"dp_shard": 2, "reshard_after_forward": reshard}
    run = build_run(tmp_path, parallel=parallel, micro_batch_size=2, gradient_accumulation=accumulation)
    found = ranks(2).call(_look, run=run)
    total = sum(masters for masters, _, _ in found)
    assert total == LLAMA.num_parameters
    units, blocks = LLAMA.num_layers + 1, LLAMA.num_layers
    gathers = accumulation * (units + (blocks if reshard else 0))
    for masters, gradients, counts in found:
        assert gradients == masters < 0.6 * total
        assert counts == {"all_gather": gathers, "reduce_scatter": units}


def _fine_tune(folder: Path, model: Path, name: str, *overrides: str) -> AnyRun:
    if not (folder / "tokens.npy").exists():
        save_tokens(folder)
    file = folder / "run.toml"
    file.write_text(
        f'name = "{name}"\nout_dir = "{folder / "runs"}"\nseed = 11\n[model]\npath = "{model}"\n'
        f'[precision]\ncompute = "float32"\n[data]\nkind = "tokens"\npaths = ["{folder / "tokens.npy"}"]\n'
        "[train]\nsteps = 4\nseq_len = 16\nmicro_batch_size = 4\nlearning_rate = 0.003\ncheck_replicas_every = 2\n"
    )
    return load_training_config(str(file), overrides)


@pytest.mark.parametrize(
    "overrides", [(), ("model.lora.rank=2",), ("model.lora.rank=1",)], ids=["all", "adapters", "adapters-of-one-row"]
)
def test_a_directory_is_trained_further_by_ranks_that_share_it_out(
    ranks: Ranks, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """Adapters too: what is frozen is gathered, and has no gradient to reduce. Of one row a rank has none."""
    model = save_hf_model(tmp_path / "model", "llama")
    whole = _fine_tune(tmp_path, model, "whole", *overrides, "train.micro_batch_size=8")
    ranks(1).call(_train, run=whole)
    shared = _fine_tune(tmp_path, model, "shared", *overrides, "parallel.tp=2", "parallel.dp_shard=2")
    ranks(4).call(_train, run=shared, stop_at=2)
    ranks(4).call(_train, run=shared)
    assert _numbers(shared) == pytest.approx(_numbers(whole), rel=REORDERED)


def test_linears_that_a_directory_has_in_one_are_not_cut_across(ranks: Ranks, tmp_path: Path) -> None:
    model = save_hf_model(tmp_path / "model", "gpt2")
    run = _fine_tune(tmp_path, model, "run", "parallel.dp_shard=2")
    with pytest.raises(ConfigError, match="several tensors of the directory in one"):
        ranks(2).call(_train, run=run)
