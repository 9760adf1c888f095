"""What `plait explain` counts of a step is what a run records: collectives, messages, bytes carried and sent."""

import pytest
import torch

from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.config.run import RunConfig
from plait.contract.report.tally import CollectiveTally, count_collectives
from plait.contract.report.training import build_step_tally
from plait.contract.training import derive_run_model
from plait.train.build import build_trainer
from plait.verify.runtime.workload import list_micro_batches
from tests.support.verification import build_config

ODD = ("model.vocab_size=257", "train.seq_len=11", "model.num_layers=2", "train.gradient_accumulation=2")


def take_step(config: RunConfig) -> CollectiveTally:
    """One step on this rank, counted as it is recorded."""
    mesh = build_mesh(config.parallel.mesh_shape, reduce_dtype=getattr(torch, config.precision.reduce_dtype))
    trainer = build_trainer(config, mesh)
    batches = list(list_micro_batches(config, mesh.dp.rank))
    with record() as trace:
        trainer.step(batches, config.train.learning_rate)
    sent = [moved.num_bytes for moved in trace.moved if moved.direction == "sent"]
    return count_collectives(trace.collectives) + CollectiveTally({}, sum(sent), float(sum(sent)), len(sent))


CASES = {
    "ring": (1, ("parallel.cp=3",)),
    "contiguous": (1, ("parallel.cp=3", "context.order=contiguous")),
    "gathered": (1, ("parallel.cp=3", "context.method=all_gather")),
    "exchanged": (1, ("parallel.cp=3", "context.method=all_to_all")),
    "tensor parallel": (2, ("parallel.cp=2",)),
    "computed again": (1, ("parallel.cp=2", "train.recompute=selective")),
    "all computed again": (2, ("parallel.cp=2", "train.recompute=full")),
    "shared out": (1, ("parallel.cp=2", "parallel.dp_shard=2")),
    "stages": (1, ("parallel.cp=2", "parallel.pp=2")),
    "split backward": (1, ("parallel.cp=2", "parallel.pp=2", "pipeline.schedule=zero_bubble")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_what_is_counted(ranks, case):
    tp, overrides = CASES[case]
    config = build_config("llama-tiny", tp, *ODD, *overrides)
    shape = config.parallel.mesh_shape
    for rank, recorded in enumerate(ranks(shape.world_size).call(take_step, config=config)):
        place = shape.coordinates(rank)
        counted = build_step_tally(config, derive_run_model(config, place.tp, place.cp), place.pp).collectives
        assert (recorded.counts, recorded.num_messages) == (counted.counts, counted.num_messages)
        assert recorded.payload_bytes == counted.payload_bytes
        assert recorded.sent_bytes == pytest.approx(counted.sent_bytes)
