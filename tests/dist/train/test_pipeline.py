"""Whole runs over pipeline stages against the run of one rank; what stops, diverges, drifts, dies or hangs on one."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.quantization import QuantizationConfig
from plait.config.run import RunConfig
from plait.errors import ContractError, PlaitError, TransportError, TransportTimeout
from plait.sharding import MeshShape
from plait.train.build import build_trainer
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import Summary, train
from plait.train.replicas import check_replicas
from tests.support.training import GPT, LLAMA, build_run, read_losses, stop_during

REORDERED = 5e-5
"""As in test_training.py."""

TIMEOUT_S = 5.0
PATIENCE_S = TIMEOUT_S + 25.0
"""Timeout, grace and ending, on a busy machine."""


def _train(run: RunConfig, stop_at: int | None = None) -> Summary:
    """Where a run is to be stopped, only the first rank, which has no loss, gets the signal."""
    mesh = build_mesh(run.parallel.mesh_shape)
    if stop_at is None or mesh.rank != 0:
        return train(run, mesh)
    with stop_during(stop_at):
        return train(run, mesh)


def _numbers(run: RunConfig) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]


@pytest.fixture(scope="module", params=[LLAMA, GPT], ids=["llama", "gpt-with-dropout"])
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[float]]:
    """A run of one rank, with twelve sequences a step, and its losses and gradient norms."""
    folder = tmp_path_factory.mktemp("reference")
    run = build_run(folder, model=request.param, name="whole", micro_batch_size=12)
    train(run, build_mesh(MeshShape()))
    return run, _numbers(run)


@pytest.mark.parametrize(
    ("parallel", "pipeline"),
    [
        ({"pp": 2}, {"schedule": "1f1b"}),
        ({"pp": 2, "tp": 2}, {"schedule": "interleaved", "stages_per_rank": 2}),
        ({"pp": 2, "tp": 2}, {"schedule": "zero_bubble"}),
        ({"pp": 2, "dp_replicate": 2}, {"schedule": "gpipe"}),
    ],
    ids=["pp2", "pp2-tp2-interleaved", "pp2-tp2-zero-bubble", "pp2-dp2-gpipe"],
)
def test_stages_do_not_change_losses(ranks, reference, parallel, pipeline, request):
    run, expected = reference
    number = 6 // parallel.get("dp_replicate", 1)
    staged = build_run(
        Path(run.out_dir).parent,
        model=run.model,
        name=request.node.callspec.id,
        parallel=parallel,
        pipeline=pipeline,
        micro_batch_size=2,
        gradient_accumulation=number,
    )
    summaries = ranks(staged.parallel.mesh_shape.world_size).call(_train, run=staged)
    assert len({summary.loss for summary in summaries}) == 1
    assert _numbers(staged) == pytest.approx(expected, rel=REORDERED)


def test_a_stop_that_the_first_stage_is_asked_for_stops_all(ranks, tmp_path):
    run = build_run(tmp_path, model=GPT, parallel={"pp": 2}, gradient_accumulation=2, checkpoint_every=0)
    for summary in ranks(2).call(_train, run=run, stop_at=3):
        assert (summary.step, summary.was_stopped) == (3, True)
    for summary in ranks(2).call(_train, run=run):
        assert (summary.step, summary.was_stopped) == (6, False)
        assert summary.resumed_from is not None


def test_histories_of_stages_go_on_over_other_stages(ranks, tmp_path):
    """Each stage has those of its own linears; a run may go on where they are all on one rank, and the other way."""
    asked: dict[str, Any] = {"recipe": "fp8_delayedscaling", "keep_first": 1, "keep_last": 0}
    names = {"staged": {"parallel": {"pp": 2}}, "whole": {}}
    losses = {}
    for name, first, second in (("a", "staged", "whole"), ("b", "whole", "staged")):
        for steps, kind in ((2, first), (4, second)):
            run = build_run(
                tmp_path, name=name, gradient_accumulation=2, steps=4, checkpoint_every=2, **names[kind]
            ).model_copy(update={"quantization": QuantizationConfig(**asked)})
            summaries = ranks(run.parallel.mesh_shape.world_size).call(_train, run=run, stop_at=steps)
            assert {summary.step for summary in summaries} == {steps}
        losses[name] = _numbers(run)
    assert losses["a"] == pytest.approx(losses["b"], rel=1e-2)


def _build_batches(run: RunConfig, step: int) -> list[MicroBatch]:
    draw = torch.Generator().manual_seed(step)
    size = (run.train.micro_batch_size, run.seq_len)
    return [
        MicroBatch(
            torch.randint(67, size, generator=draw),
            torch.randint(67, (run.tokens_per_micro_batch,), generator=draw),
            (step * run.train.gradient_accumulation + index) * run.tokens_per_micro_batch,
        )
        for index in range(run.train.gradient_accumulation)
    ]


def _drift(run: RunConfig) -> str:
    """The last stage's copy of the tied table is no longer that of the first."""
    mesh = build_mesh(run.parallel.mesh_shape)
    trainer = build_trainer(run, mesh)
    trainer.step(_build_batches(run, 0), 0.01)
    check_replicas(trainer.model, mesh)
    if mesh.pp.rank == mesh.pp.degree - 1:
        with torch.no_grad():
            trainer.model.get_parameter("embedding.weight").flatten()[0].add_(1)
    with pytest.raises(ContractError) as caught:
        check_replicas(trainer.model, mesh)
    return caught.value.message


def test_a_tied_table_that_drifts_apart_is_named(ranks, tmp_path):
    run = build_run(tmp_path, model=GPT, parallel={"pp": 2}, gradient_accumulation=2)
    for message in ranks(2).call(_drift, run=run):
        assert message.endswith("are no longer the same on all ranks: embedding.weight")


def _diverge(run: RunConfig) -> str:
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    if trainer.mesh.pp.rank == 0:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(PlaitError) as caught:
        trainer.step(_build_batches(run, 0), 0.01)
    return caught.value.message


def test_every_stage_says_that_training_diverged(ranks, tmp_path):
    run = build_run(tmp_path, parallel={"pp": 2}, gradient_accumulation=2)
    assert all(message.startswith("training diverged: loss nan") for message in ranks(2).call(_diverge, run=run))


def _refuse(run: RunConfig) -> str:
    """What a stage raises on purpose comes out of torch's schedule as it was."""
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    batches = _build_batches(run, 0)
    wrong = [replace(batch, tokens=batch.tokens + 67) for batch in batches]
    trainer.step(wrong, 0.01)
    return "done"


def test_what_a_stage_raises_is_raised_as_it_was(tmp_path):
    """On a busy machine ranks may come to their first collective long after each other."""
    run = build_run(tmp_path, parallel={"pp": 2, "tp": 1}, gradient_accumulation=2)
    with (
        LocalRanks(2, timeout_s=60.0, device_type="cpu") as fresh,
        pytest.raises(TransportError, match="rank 0 .* raised IndexError: index out of range in self"),
    ):
        fresh.call(_refuse, run=run)


@pytest.fixture
def fresh() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout_s=TIMEOUT_S, device_type="cpu") as ranks:
        yield ranks


def _fail(run: RunConfig, how: str) -> str:
    """The last stage does something else when it comes to its second micro-batch."""
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    trainer.step(_build_batches(run, 0), 0.01)
    compute, calls = trainer.compute_logits, []

    def fail(model: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) == 2 and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 2 and how == "hang":
            time.sleep(3 * PATIENCE_S)
        return compute(model, x)

    with patch.object(trainer, "compute_logits", fail):
        trainer.step(_build_batches(run, 1), 0.01)
    return "done"


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    ("how", "kind", "heading"),
    [
        ("die", TransportError, "rank 1 (pp=1 tp=0) died: killed by SIGKILL\n"),
        ("hang", TransportTimeout, "rank 1 (pp=1 tp=0) did not come: "),
    ],
    ids=["die", "hang"],
)
def test_a_stage_that_fails_is_named_with_what_every_rank_did_last(fresh, tmp_path, schedule, how, kind, heading):
    run = build_run(tmp_path, parallel={"pp": 2}, pipeline={"schedule": schedule}, gradient_accumulation=4)
    fresh.call(_fail, run=run, how="not at all")
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        fresh.call(_fail, run=run, how=how)
    assert time.monotonic() - start < PATIENCE_S
    error = caught.value
    assert isinstance(error, kind)
    assert error.message.startswith(heading), error.message
    assert error.message.count("last collective #") == 2, error.message
    assert "on pp/stages: " in error.message
    assert "of micro-batch " in error.message
