"""A run that is saved on one mesh and goes on, on any other: nothing is lost, and the next loss is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.index import Index
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.model import ModelConfig
from plait.config.run import RunConfig
from plait.sharding import MeshShape
from plait.train.build import build_trainer
from plait.train.loop import train
from plait.train.saves import Saves
from plait.train.state import resume
from tests.support.checkpoints import read_tensors
from tests.support.training import GPT, LLAMA, build_run, read_losses

Ranks = Callable[[int], LocalRanks]

WITHOUT_ATTENTION_DROPOUT = GPT.model_copy(update={"attention_dropout": 0.0})
"""Probabilities of attention are not drawn over context ranks, which refuse them; all other dropout is."""

REORDERED = 2e-5
"""Relative, of the loss and gradient norm of one float32 step: sums in another order. Measured: up to 3e-6."""

MESHES: dict[str, dict[str, Any]] = {
    "tp3": {"tp": 3},
    "tp4-all-reduce": {"tp": 4, "sequence_parallel": False},
    "dp2-tp2": {"dp_replicate": 2, "tp": 2},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "pp2-dp2": {"pp": 2, "dp_replicate": 2},
    "pp2-fsdp2": {"pp": 2, "dp_shard": 2},
    "fsdp3": {"dp_shard": 3},
    "fsdp2-tp2": {"dp_shard": 2, "tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "fsdp2-cp2": {"dp_shard": 2, "cp": 2},
}


def _build_run(folder: Path, model: ModelConfig, name: str, parallel: dict[str, Any], steps: int) -> RunConfig:
    """Of twelve sequences a step, in micro-batches of three, of which a pipeline has as many as stages or more."""
    dp = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    batch = {"micro_batch_size": 3, "gradient_accumulation": 4 // dp} if dp in (1, 2, 4) else {"micro_batch_size": 12 // dp}
    return build_run(folder, model=model, name=name, parallel=parallel, steps=steps, **batch)


def _save_again_and_go_on(run: RunConfig, checkpoint: Path) -> Path:
    """Load a checkpoint, save what was loaded as the run's own, and train on from there."""
    mesh = build_mesh(run.parallel.mesh_shape)
    identity = Index.from_folder(checkpoint).state["identity"]
    trainer = build_trainer(run, mesh)
    saves = Saves(trainer, identity)
    saved = saves.save(resume(trainer, checkpoint, identity))
    train(run, mesh)
    return saved


@pytest.fixture(scope="module", params=[LLAMA, WITHOUT_ATTENTION_DROPOUT], ids=["llama", "gpt-tied-with-dropout"])
def origin(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Path, tuple[float, ...]]:
    """A checkpoint of one rank after two steps, and the loss and gradient norm of the third."""
    folder = tmp_path_factory.mktemp("origin")
    run = _build_run(folder, request.param, "origin", {}, steps=2)
    checkpoint = train(run, build_mesh(MeshShape())).checkpoint
    train(replace_steps(run, 3), build_mesh(MeshShape()))
    return request.param, checkpoint, read_losses(run)[2][1:]


def replace_steps(run: RunConfig, steps: int) -> RunConfig:
    """The run, longer: the schedule depends on its length, and so do both sides of every comparison."""
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})


@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_goes_on_as_one_rank_does_and_loses_no_bit(
    ranks: Ranks, origin: tuple[ModelConfig, Path, tuple[float, ...]], mesh: str
) -> None:
    model, checkpoint, expected = origin
    folder = checkpoint.parents[3]
    run = _build_run(folder, model, mesh, MESHES[mesh], steps=3)
    saved = ranks(run.parallel.mesh_shape.world_size).call(_save_again_and_go_on, run=run, checkpoint=checkpoint)[0]
    before, after = read_tensors(checkpoint), read_tensors(saved)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(after[name], tensor)] == []
    assert read_losses(run)[0][1:] == pytest.approx(expected, rel=REORDERED)


def test_a_way_over_many_meshes_ends_where_it_began(ranks: Ranks, tmp_path: Path) -> None:
    """tp 2 -> 3 -> pp 2 x tp 2 -> pp 2 x dp_shard 2 -> dp_shard 2 x tp 2 -> 1, each from what the one before saved, bit for bit."""
    start = _build_run(tmp_path, GPT, "start", {"tp": 2}, steps=1)
    first = saved = ranks(2).call(_train, run=start)[0]
    for mesh in ("tp3", "pp2-tp2", "pp2-fsdp2", "fsdp2-tp2"):
        run = _build_run(tmp_path, GPT, mesh, MESHES[mesh], steps=1)
        saved = ranks(run.parallel.mesh_shape.world_size).call(_save_again_and_go_on, run=run, checkpoint=saved)[0]
    saved = _save_again_and_go_on(_build_run(tmp_path, GPT, "end", {}, steps=1), saved)
    before, after = read_tensors(first), read_tensors(saved)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def _train(run: RunConfig) -> Path:
    return train(run, build_mesh(run.parallel.mesh_shape)).checkpoint
