"""A plan becomes a config, the config a run, and a step of the run moves what was planned."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plait.comm import trace
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.file.format import format_run_config
from plait.config.load import load_training_config
from plait.config.run import AnyRun
from plait.contract.collective import Collective
from plait.planner import Cluster, load_hardware, plan
from plait.planner.run_config import build_run_config, choose_runnable
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import build_trainer
from tests.support.training import build_run

Ranks = Callable[[int], LocalRanks]

_MODULO = 67


def _record_step(run: AnyRun) -> Counter[Collective]:
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))  # type: ignore[arg-type]
    rows = torch.arange(17).repeat(run.train.micro_batch_size, 1) + trainer.mesh.dp.rank
    batch = MicroBatch(rows[:, :-1].contiguous() % _MODULO, rows[:, 1:].flatten() % _MODULO, 0)
    with trace.record() as recorded:
        trainer.step([batch] * run.train.gradient_accumulation, 0.01)
    return Counter(recorded.collectives)


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_a_planned_step_moves_what_was_planned(ranks: Ranks, tmp_path: Path, micro_batch: int) -> None:
    """Parameters shared out over two ranks, in one micro-batch and in two."""
    base = build_run(tmp_path)
    asked = {"sharded": "parameters", "dp_shard": 2, "micro_batch": micro_batch, "precision": base.precision}
    report = plan(base.model, Cluster(load_hardware("cpu"), 2), seq_len=16, global_batch=8, fixed=asked)
    chosen, note = choose_runnable(report)
    assert not note
    path = tmp_path / "plan.toml"
    path.write_text(format_run_config(build_run_config(chosen, base)))
    run = load_training_config(str(path))
    assert (run.parallel.dp_shard, run.train.gradient_accumulation) == (2, 4 // micro_batch)
    planned = chosen.step.count_collectives()
    for issued in ranks(2).call(_record_step, run=run):
        assert {move: issued[move] for move in planned} == planned
        left = issued - planned
        # Loss and number of targets are gathered, and squares of the gradients summed, once a step.
        assert {(move.kind.value, move.shape) for move in left} == {("all_gather", (2, 3)), ("all_reduce", (1,))}
