from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.run import RunConfig
from plait.errors import ConfigError, ContractError
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import build_trainer, train
from plait.train.replicas import check_replicas, check_same_batch
from tests.support.training import LLAMA, build_run, save_tokens

Ranks = Callable[[int], LocalRanks]

FEW_HEADS = LLAMA.model_copy(update={"num_kv_heads": 2})
"""At tp 4 two ranks share each KV head."""


def _check_batch(run: RunConfig, odd_rank: int | None) -> None:
    mesh = build_mesh(run.parallel.mesh_shape)
    tokens = torch.full((2, 3), mesh.dp.rank)
    tokens[1, 2] += mesh.rank == odd_rank
    check_same_batch([MicroBatch(tokens, tokens.flatten(), 0)], mesh)


def test_ranks_of_one_tp_group_must_get_the_same_batch(ranks: Ranks, tmp_path: Path) -> None:
    """FIELD 3.36: a batch hash across the tp group on step 0. Groups differ from each other, as they should."""
    run = build_run(tmp_path, parallel={"dp_replicate": 2, "tp": 2})
    ranks(4).call(_check_batch, run=run, odd_rank=None)
    with pytest.raises(ContractError, match=r"must get the same batch, and those of dp=1 did not"):
        ranks(4).call(_check_batch, run=run, odd_rank=3)


def _train_on_own_tokens(run: RunConfig, folders: list[str]) -> None:
    mesh = build_mesh(run.parallel.mesh_shape)
    paths = (f"{folders[mesh.rank]}/*.npy",)
    run = run.model_copy(update={"data": run.data.model_copy(update={"paths": paths})})  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.train.loop.check_same_config", lambda run, mesh: None)
        patch.setattr("plait.train.corpus.tokenize.share", lambda value, mesh: [_list(folders[mesh.rank])])
        patch.setattr("plait.train.corpus.tokenize._wait", lambda future: True)
        train(run, mesh)


def _list(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.npy"))


def test_training_checks_the_batch_before_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank is made to read files of its own."""
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        save_tokens(folder, seed=seed)
    run = build_run(tmp_path, parallel={"tp": 2})
    with pytest.raises(ContractError, match="must get the same batch"):
        ranks(2).call(_train_on_own_tokens, run=run, folders=list(map(str, folders)))
    assert not (tmp_path / "runs" / "run" / "checkpoints").exists()


def _drift(run: RunConfig, parameter: str, odd_rank: int | None) -> None:
    mesh = build_mesh(run.parallel.mesh_shape)
    trainer = build_trainer(run, mesh)
    if mesh.rank == odd_rank:
        with torch.no_grad():
            flat = trainer.model.get_parameter(parameter).flatten()
            flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))
    check_replicas(trainer.model, mesh)


@pytest.mark.parametrize(
    ("parallel", "parameter"),
    [
        ({"tp": 4}, "norm.weight"),
        ({"tp": 4}, "layers.1.attention.wk.weight"),
        ({"dp_replicate": 2, "tp": 2}, "layers.0.mlp.w_down.weight"),
        ({"dp_replicate": 4}, "embedding.weight"),
    ],
)
def test_a_replica_that_drifts_by_one_bit_is_found_and_named(
    ranks: Ranks, tmp_path: Path, parallel: dict[str, Any], parameter: str
) -> None:
    """FIELD 3.9: whole parameters over tp, KV heads within their subgroup, everything over dp."""
    run = build_run(tmp_path, model=FEW_HEADS, parallel=parallel)
    ranks(4).call(_drift, run=run, parameter=parameter, odd_rank=None)
    with pytest.raises(ContractError, match=f"no longer the same on all ranks: {parameter}\n"):
        ranks(4).call(_drift, run=run, parameter=parameter, odd_rank=2)


def test_what_each_tp_rank_holds_alone_may_differ(ranks: Ranks, tmp_path: Path) -> None:
    run = build_run(tmp_path, model=FEW_HEADS, parallel={"tp": 4})
    ranks(4).call(_drift, run=run, parameter="layers.0.mlp.w_down.weight", odd_rank=2)


def _train_with(runs: list[RunConfig]) -> None:
    mesh = build_mesh(runs[0].parallel.mesh_shape)
    train(runs[mesh.rank], mesh)


def test_ranks_with_different_configs_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    runs = [build_run(tmp_path, parallel={"tp": 2}, learning_rate=rate) for rate in (0.1, 0.2)]
    with pytest.raises(
        ConfigError, match=r"the config of rank 1 is not that of rank 0: train.learning_rate = 0.2, not 0.1\n"
    ):
        ranks(2).call(_train_with, runs=runs)
    assert not (tmp_path / "runs").exists()
