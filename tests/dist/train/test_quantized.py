"""Training under precision recipes: what is issued, resumed and refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.index import Index
from plait.comm import trace
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.model import LlamaConfig
from plait.config.quantization import QuantizationConfig
from plait.config.run import RunConfig
from plait.contract.collective import Collective
from plait.contract.training import derive_run_model, derive_step_collectives
from plait.errors import CheckpointError
from plait.sharding import MeshShape
from plait.train.build import build_trainer
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import Summary, train
from plait.train.state import list_tensors, resume
from tests.support.training import build_run, read_losses, stop_during

Ranks = Callable[[int], LocalRanks]

RECIPES = ("fp8_currentscaling", "fp8_delayedscaling", "mxfp8", "nvfp4")

MODEL = LlamaConfig(
    num_layers=3, width=128, num_heads=4, num_kv_heads=2, mlp_width=160, vocab_size=67, max_seq_len=16, qkv_bias=True
)
"""The block in the middle is quantized. Its heads are blocks of 32; its columns are five, over two ranks uneven."""


def _build(
    folder: Path, recipe: str, *, name: str = "run", options: dict[str, Any] | None = None, **fields: Any
) -> RunConfig:
    """Six sequences of 16 tokens: three blocks of 32."""
    settings: dict[str, Any] = {"micro_batch_size": 6, "learning_rate": 0.003, **fields}
    run = build_run(folder, model=MODEL, name=name, **settings)
    quantization = QuantizationConfig.model_validate({"recipe": recipe, **(options or {})})
    return run.model_copy(update={"quantization": quantization})


def _train(run: RunConfig, stop_at: int | None = None) -> Summary:
    mesh = build_mesh(run.parallel.mesh_shape)
    if stop_at is None:
        return train(run, mesh)
    with stop_during(stop_at):
        return train(run, mesh)


def _trace_steps(run: RunConfig) -> list[list[Collective]]:
    """What is issued in a first step and in a second one."""
    mesh = build_mesh(run.parallel.mesh_shape)
    trainer = build_trainer(run, mesh)
    steps = []
    for step in range(2):
        tokens = torch.randint(67, (6, 16), generator=torch.Generator().manual_seed(step + 2 * mesh.dp.rank))
        with trace.record() as recorded:
            trainer.step([MicroBatch(tokens, tokens.flatten(), first_token=96 * step)], 1e-3)
        steps.append(recorded.collectives)
    return steps


@pytest.mark.parametrize(
    "parallel", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"tp": 2, "dp": 2}], ids=["sp", "ar", "dp"]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_issues_what_the_contract_promises(
    ranks: Ranks, tmp_path: Path, recipe: str, parallel: dict[str, Any]
) -> None:
    """Bytes that are gathered, one reduction of magnitudes a pass, and with a history none but one a step."""
    run = _build(tmp_path, recipe, parallel=parallel)
    traced = ranks(run.parallel.mesh_shape.world_size).call(_trace_steps, run=run)
    for rank, (first, second) in enumerate(traced):
        tp_rank = rank % run.parallel.tp
        for issued, is_calibrated in ((first, False), (second, True)):
            contract = derive_run_model(run, tp_rank, is_calibrated=is_calibrated)
            assert issued == list(derive_step_collectives(run, contract))


def _numbers(run: RunConfig) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]


CLOSE = 2e-3
"""Relative, of losses and gradient norms of six steps: a float32 sum in another order lets single numbers fall into the
next code, a sixteenth or half of themselves away. Measured: up to {measured}."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_do_not_depend_on_the_mesh(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """Scales, noise of rounding and histories are those of one rank at every degree, uneven cuts included."""
    whole = _build(tmp_path, recipe, name="whole")
    train(whole, build_mesh(MeshShape()))
    for parallel in ({"tp": 2}, {"tp": 3}, {"tp": 2, "sequence_parallel": False}):
        run = _build(tmp_path, recipe, name="-".join(map(str, parallel.values())), parallel=parallel)
        ranks(run.parallel.tp).call(_train, run=run)
        print(max(abs(a / b - 1) for a, b in zip(_numbers(run), _numbers(whole))), _numbers(run)[:3])
        assert _numbers(run) == pytest.approx(_numbers(whole), rel=CLOSE)
