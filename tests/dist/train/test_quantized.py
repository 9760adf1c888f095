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
from plait.errors import CheckpointError, PlaitError
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
    "parallel",
    [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"tp": 3}, {"tp": 2, "dp_replicate": 2}],
    ids=["sp", "ar", "shared-heads", "dp"],
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


FIRST = 1e-5
"""Relative, of the loss and the gradient norm of the first step: float32 sums in another order."""

CLOSE = 4e-2
"""Relative, of six steps: a number that is rounded otherwise may fall into the next code, a sixteenth or half of itself
away, and every step carries that on. Measured: up to 1.1e-2; where gradients of shared heads were quantized before they
were whole it was 6e-2, and 1e-3 in the first step."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_do_not_depend_on_the_mesh(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """Scales, noise of rounding and histories are those of one rank at every degree; over three ranks one KV head is
    that of two.
    """
    whole = _build(tmp_path, recipe, name="whole")
    train(whole, build_mesh(MeshShape()))
    for parallel in ({"tp": 2}, {"tp": 3}, {"tp": 3, "sequence_parallel": False}):
        run = _build(tmp_path, recipe, name="-".join(map(str, parallel.values())), parallel=parallel)
        ranks(run.parallel.tp).call(_train, run=run)
        assert _numbers(run)[:2] == pytest.approx(_numbers(whole)[:2], rel=FIRST)
        assert _numbers(run) == pytest.approx(_numbers(whole), rel=CLOSE)


def _read_full(run: RunConfig, checkpoint: Path) -> dict[str, torch.Tensor]:
    trainer = build_trainer(run, build_mesh(MeshShape()))
    resume(trainer, checkpoint, Index.from_folder(checkpoint).state["identity"])
    return {name: owned.tensor for name, owned in list_tensors(trainer).items()}


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "nvfp4"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """Histories and noise too; two micro-batches a step, of which the largest magnitudes are noted."""
    fields: dict[str, Any] = {"parallel": {"tp": 2}, "micro_batch_size": 4, "gradient_accumulation": 2}
    whole, parts = (_build(tmp_path, recipe, name=name, **fields) for name in ("whole", "parts"))
    expected = ranks(2).call(_train, run=whole)[0]
    ranks(2).call(_train, run=parts, stop_at=3)
    resumed = ranks(2).call(_train, run=parts)[0]
    assert read_losses(parts) == read_losses(whole)
    tensors, other = _read_full(parts, resumed.checkpoint), _read_full(whole, expected.checkpoint)
    assert all(torch.equal(tensors[name], other[name]) for name in other)
    histories = [name for name in tensors if name.startswith("amax_history.")]
    assert len(histories) == (21 if recipe == "fp8_delayedscaling" else 0)
    assert all((tensors[name][:6] > 0).all() and (tensors[name][6:] < 0).all() for name in histories)


def _reshard(run: RunConfig, checkpoint: Path) -> dict[str, torch.Tensor]:
    """The histories of a rank that goes on at another degree."""
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    resume(trainer, checkpoint, Index.from_folder(checkpoint).state["identity"])
    return {name: owned.tensor for name, owned in list_tensors(trainer).items() if name.startswith("amax_history.")}


def test_histories_are_the_same_at_every_degree(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(2).call(_train, run=_build(tmp_path, "fp8_delayedscaling", parallel={"tp": 2}))[0].checkpoint
    saved = _read_full(_build(tmp_path, "fp8_delayedscaling"), first)
    for histories in ranks(3).call(
        _reshard, run=_build(tmp_path, "fp8_delayedscaling", parallel={"tp": 3}), checkpoint=first
    ):
        assert len(histories) == 21
        assert all(torch.equal(values, saved[name]) for name, values in histories.items())


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("none", {}, "in the checkpoint alone: layers.1.attention.wk.gradient, .* and 18 more"),
        ("mxfp8", {}, "in the checkpoint alone: layers.1.attention.wk.gradient"),
        ("fp8_delayedscaling", {"amax_history": 4}, "quantization.amax_history: 16 in the checkpoint, 4 now"),
        ("fp8_delayedscaling", {"layers": "mlp_only"}, "in the checkpoint alone: layers.1.attention.wk.gradient"),
        ("fp8_delayedscaling", {"keep_first": 0}, "new: layers.0.attention.wk.gradient"),
    ],
)
def test_histories_of_other_scales_are_refused(tmp_path: Path, recipe: str, options: dict[str, Any], said: str) -> None:
    checkpoint = train(_build(tmp_path, "fp8_delayedscaling", steps=1), build_mesh(MeshShape())).checkpoint
    run = _build(tmp_path, recipe, options=options)
    trainer = build_trainer(run, build_mesh(MeshShape()))
    before = {name: owned.tensor.clone() for name, owned in list_tensors(trainer).items()}
    with pytest.raises(CheckpointError, match=said):
        resume(trainer, checkpoint, Index.from_folder(checkpoint).state["identity"])
    assert all(torch.equal(owned.tensor, before[name]) for name, owned in list_tensors(trainer).items())


def _overflow(run: RunConfig) -> bool:
    """Whether a step that found something that is not finite has left every parameter as it was."""
    trainer = build_trainer(run, build_mesh(run.parallel.mesh_shape))
    with torch.no_grad():
        trainer.model.get_parameter("layers.1.mlp_norm.weight").fill_(torch.inf)
    before = [param.clone() for param in trainer.model.parameters()]
    tokens = torch.randint(67, (6, 16), generator=torch.Generator().manual_seed(0))
    with pytest.raises(PlaitError, match="layers.1.mlp.w_gate: its input has values that are not finite"):
        trainer.step([MicroBatch(tokens, tokens.flatten(), first_token=0)], 1e-3)
    return all(torch.equal(param, old) for param, old in zip(trainer.model.parameters(), before, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_parameters_stay_where_something_is_not_finite(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    assert ranks(2).call(_overflow, run=_build(tmp_path, recipe, parallel={"tp": 2})) == [True, True]
