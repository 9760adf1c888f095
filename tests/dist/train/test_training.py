"""Whole runs over several ranks against the run of one rank, which is that of this process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from plait.checkpoint.index import Index
from plait.comm import trace
from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.model import ModelConfig
from plait.config.run import RunConfig
from plait.contract.collective import Collective
from plait.contract.training import derive_run_model, derive_step_collectives
from plait.models.registry import build_model
from plait.sharding import MeshShape
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import Summary, build_trainer, train
from plait.train.saves import Saves
from plait.train.state import list_tensors, resume
from tests.support.checkpoints import read_tensors, read_with_torch
from tests.support.rank_pool import COMPILING_S
from tests.support.training import GPT, LLAMA, build_run, read_losses, stop_during

Ranks = Callable[[int], LocalRanks]

REORDERED = 5e-5
"""Relative, of losses and gradient norms of six steps at a high learning rate: float32 sums in another order differ by
2**-24 each, and every step of training carries the difference on and enlarges it. Measured: up to 1.2e-5."""


def _train(run: RunConfig, stop_at: int | None = None) -> Summary:
    """On one rank; where a run is to be stopped, only the last rank gets the signal."""
    mesh = build_mesh(run.parallel.mesh_shape)
    if stop_at is None or mesh.rank != run.parallel.mesh_shape.world_size - 1:
        return train(run, mesh)
    with stop_during(stop_at):
        return train(run, mesh)


def _read_full(run: RunConfig, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    trainer = build_trainer(run, build_mesh(MeshShape()))
    resume(trainer, checkpoint, Index.from_folder(checkpoint).state["identity"])
    return {name: owned.tensor for name, owned in list_tensors(trainer).items()}


def _numbers(run: RunConfig) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]


@pytest.fixture(scope="module", params=[LLAMA, GPT], ids=["llama", "gpt-with-dropout"])
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[float]]:
    """A run of one rank, with twelve sequences a step, and its losses and gradient norms."""
    folder = tmp_path_factory.mktemp("reference")
    run = build_run(folder, model=request.param, name="whole", micro_batch_size=12)
    train(run, build_mesh(MeshShape()))
    return run, _numbers(run)


def _vary(reference: RunConfig, name: str, parallel: dict[str, Any], **train_fields: Any) -> RunConfig:
    folder = Path(reference.out_dir).parent
    return build_run(folder, model=reference.model, name=name, parallel=parallel, **train_fields)


@pytest.mark.parametrize(
    ("parallel", "train_fields"),
    [
        ({"tp": 2}, {"micro_batch_size": 12}),
        ({"tp": 2, "sequence_parallel": False}, {"micro_batch_size": 4, "gradient_accumulation": 3}),
        ({"tp": 3}, {"micro_batch_size": 12}),
        ({"dp_replicate": 2, "tp": 2}, {"micro_batch_size": 3, "gradient_accumulation": 2}),
        ({"dp_replicate": 3}, {"micro_batch_size": 4}),
    ],
    ids=["tp2", "tp2-all-reduce", "tp3", "dp2-tp2", "dp3"],
)
def test_losses_do_not_depend_on_the_mesh(
    ranks: Ranks, reference: tuple[RunConfig, list[float]], parallel: dict[str, Any], train_fields: dict[str, Any]
) -> None:
    """Same init, same dropout masks, same tokens, true vocabulary: the loss curve is that of one rank."""
    whole, expected = reference
    name = "-".join(map(str, [*parallel, *parallel.values()]))
    run = _vary(whole, name, parallel, **train_fields)
    summaries = ranks(run.parallel.mesh_shape.world_size).call(_train, run=run)
    assert len(set(summaries)) == 1
    assert _numbers(run) == pytest.approx(expected, rel=REORDERED)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++, and there is no g++")
@pytest.mark.timeout(COMPILING_S)
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt-with-dropout"])
def test_a_compiled_run_has_the_losses_of_an_eager_one(
    compiling_ranks: Ranks, tmp_path: Path, model: ModelConfig
) -> None:
    """Masks of dropout are those of the step, though the graph is that of the first."""
    runs = [
        build_run(
            tmp_path, model=model, parallel={"tp": 2}, name=name, steps=3, compile=is_compiled, timeout_s=COMPILING_S
        )
        for name, is_compiled in (("eager", False), ("compiled", True))
    ]
    for run in runs:
        compiling_ranks(2).call(_train, run=run)
    eager, compiled = map(_numbers, runs)
    assert compiled == pytest.approx(eager, rel=REORDERED)


def test_a_resumed_run_on_several_ranks_is_the_uninterrupted_one_bit_for_bit(
    ranks: Ranks, reference: tuple[RunConfig, list[float]]
) -> None:
    """The signal reaches one rank only, and all of them stop after the same step."""
    fields: dict[str, Any] = {"micro_batch_size": 3, "gradient_accumulation": 2}
    whole, parts = (_vary(reference[0], name, {"dp_replicate": 2, "tp": 2}, **fields) for name in ("uninterrupted", "parts"))
    expected = ranks(4).call(_train, run=whole)[0]
    stopped = ranks(4).call(_train, run=parts, stop_at=3)
    assert {(summary.step, summary.was_stopped) for summary in stopped} == {(3, True)}
    resumed = ranks(4).call(_train, run=parts)[0]
    assert resumed.resumed_from == stopped[0].checkpoint
    assert read_losses(parts) == read_losses(whole)
    tensors, other = _read_full(parts, resumed.checkpoint), _read_full(whole, expected.checkpoint)
    assert all(torch.equal(tensors[name], other[name]) for name in other)


def test_a_run_goes_on_at_another_degree(ranks: Ranks, reference: tuple[RunConfig, list[float]]) -> None:
    """FIELD 3.35: optimizer tensors change layout as well; the curve goes on as if nothing had happened."""
    whole, expected = reference
    meshes: list[dict[str, Any]] = [{"tp": 3}, {"dp_replicate": 2, "tp": 2}, {"tp": 2}]
    sizes = [12, 6, 12]
    for parallel, size, stop_at in zip(meshes, sizes, (2, 4, None), strict=True):
        run = _vary(whole, "wandering", parallel, micro_batch_size=size)
        ranks(run.parallel.mesh_shape.world_size).call(_train, run=run, stop_at=stop_at)
    assert _numbers(run) == pytest.approx(expected, rel=REORDERED)


def test_resharding_a_run_there_and_back_is_bitwise(ranks: Ranks, tmp_path: Path) -> None:
    """FIELD 3.35, over real ranks: saved at tp 2, loaded and saved at tp 3, loaded and saved at tp 2 again."""
    first = ranks(2).call(_train, run=build_run(tmp_path, parallel={"tp": 2}, steps=2))[0].checkpoint
    second = ranks(3).call(_reshard, run=build_run(tmp_path, parallel={"tp": 3}, name="b"), checkpoint=first)[0]
    third = ranks(2).call(_reshard, run=build_run(tmp_path, parallel={"tp": 2}, name="c"), checkpoint=second)[0]
    before, after = read_tensors(first), read_tensors(third)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (first / "__1_0.distcp").read_bytes() == (third / "__1_0.distcp").read_bytes()


def test_whoever_has_torch_alone_reads_what_ranks_wrote(ranks: Ranks, tmp_path: Path) -> None:
    """Parameters straight into the unsharded model, and everything as nested dicts; as plait reads it at one rank."""
    run = build_run(tmp_path, model=GPT, parallel={"tp": 3}, steps=2)
    saved = ranks(3).call(_train, run=run)[0].checkpoint
    expected = _read_full(build_run(tmp_path, model=GPT), saved)
    model = build_model(run.model)
    params = dict(model.named_parameters())  # a state dict names tied weights twice
    held = {"model": params, "state": None}
    with pytest.warns(UserWarning, match=r"torch.distributed is .* uninitialized"):
        dcp.load(held, checkpoint_id=saved)
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in params.items())
    assert held["state"]["position"] == {"step": 2, "consumed_sequences": 8}  # type: ignore[index]
    read = read_tensors(saved)
    assert read.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())
    whole = read_with_torch(saved)
    assert {name: list(each) for name, each in whole.items() if name != "state"} == {
        "model": list(params),
        "optimizer": ["exp_avg", "exp_avg_sq"],
    }
    assert whole["state"] == Index.from_folder(saved).state


def _reshard(run: RunConfig, checkpoint: Path) -> Path:
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    identity = Index.from_folder(checkpoint).state["identity"]
    return Saves(trainer, identity).save(resume(trainer, checkpoint, identity))


@pytest.mark.parametrize(
    "precision",
    [{"compute": "float32"}, {"compute": "bfloat16"}, {"compute": "bfloat16", "reduce": "float32"}],
    ids=["float32", "bfloat16", "bfloat16-reduced-in-float32"],
)
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_step_issues_what_the_contract_promises(
    ranks: Ranks, tmp_path: Path, model: ModelConfig, precision: dict[str, Any]
) -> None:
    """Two micro-batches, the totals, the gradients over dp, the gradient norm: kind, axis, shape, dtype and order."""
    fields: dict[str, Any] = {"gradient_accumulation": 2, "label_smoothing": 0.1}
    run = build_run(tmp_path, model=model, parallel={"dp_replicate": 2, "tp": 2}, precision=precision, **fields)
    for rank, issued in enumerate(ranks(4).call(_trace_step, run=run)):
        assert issued == list(derive_step_collectives(run, derive_run_model(run, tp_rank=rank % 2)))


def _trace_step(run: RunConfig) -> list[Collective]:
    reduce_dtype = getattr(torch, run.precision.reduce_dtype)
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape, reduce_dtype=reduce_dtype))
    rows = torch.randint(0, 67, (4, 17), generator=torch.Generator().manual_seed(trainer.mesh.dp.rank))
    batch = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].flatten(), 0)
    with trace.record() as recorded:
        trainer.step([batch, batch], 0.01)
    return recorded.collectives
