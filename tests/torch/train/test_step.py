from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from plait.comm.mesh import build_mesh
from plait.config.precision import PrecisionConfig
from plait.errors import PlaitError
from plait.sharding import MeshShape
from plait.train.corpus.windows import MicroBatch
from plait.train.loop import build_trainer
from plait.train.step import IGNORE_INDEX, Trainer
from tests.support.training import build_run

MESH = build_mesh(MeshShape())

REORDERED = 1e-5
"""Relative: float32 sums of a few hundred addends in another order (2**-24 each, growing with their square root)."""


def _batches(*sizes: int) -> list[MicroBatch]:
    """As many micro-batches as sizes, the same sequences however they are grouped; some targets ignored."""
    rows = torch.randint(0, 67, (sum(sizes), 17), generator=torch.Generator().manual_seed(2))
    targets = rows[:, 1:].clone()
    targets[torch.arange(sum(sizes)) % 2 == 0, :10] = IGNORE_INDEX
    batches, first = [], 0
    for size in sizes:
        chosen = slice(first, first + size)
        batches.append(MicroBatch(rows[chosen, :-1].contiguous(), targets[chosen].flatten(), first * 16))
        first += size
    return batches


def _build(folder: Path, compute: str = "float32") -> Trainer:
    run = build_run(folder)
    precision = PrecisionConfig(compute=compute)  # type: ignore[arg-type]
    return build_trainer(run.model_copy(update={"precision": precision}), MESH)


def test_loss_and_gradient_are_the_mean_over_all_targets_of_the_step(tmp_path: Path) -> None:
    """A mean of the means of micro-batches would weigh tokens of a batch with many ignored targets more."""
    trainer = _build(tmp_path)
    batches = _batches(4, 1)
    logits = torch.cat([trainer.model(batch.tokens) for batch in batches])
    loss = F.cross_entropy(logits, torch.cat([batch.targets for batch in batches]), ignore_index=IGNORE_INDEX)
    params = list(trainer.model.parameters())
    norm = torch.stack([grad.norm() for grad in torch.autograd.grad(loss, params)]).norm()
    result = trainer.step(batches, 0.0)
    assert result.loss == pytest.approx(loss.item(), rel=REORDERED)
    assert result.grad_norm == pytest.approx(norm.item(), rel=REORDERED)


def test_accumulation_is_one_large_batch(tmp_path: Path) -> None:
    whole, spread = _build(tmp_path), _build(tmp_path)
    results = [whole.step(_batches(6), 0.01), spread.step(_batches(3, 1, 2), 0.01)]
    assert results[0].loss == pytest.approx(results[1].loss, rel=REORDERED)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=REORDERED)


def test_a_step_in_bfloat16_reduces_and_updates_in_float32(tmp_path: Path) -> None:
    trainer = _build(tmp_path, "bfloat16")
    trainer.step(_batches(2, 2), 0.01)
    assert {param.dtype for param in trainer.model.parameters()} == {torch.bfloat16}
    assert {param.grad.dtype for param in trainer.model.parameters() if param.grad is not None} == {torch.float32}
    assert {master.dtype for master in trainer.optimizer.masters.values()} == {torch.float32}


def test_masters_are_initialized_in_float32_whatever_is_computed_in(tmp_path: Path) -> None:
    half, full = _build(tmp_path, "bfloat16"), _build(tmp_path)
    for name, master in half.optimizer.masters.items():
        assert torch.equal(master, full.optimizer.masters[name]), name


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported(tmp_path: Path) -> None:
    trainer = _build(tmp_path)
    trainer.run = trainer.run.model_copy(update={"train": trainer.run.train.model_copy(update={"max_grad_norm": 0.01})})
    result = trainer.step(_batches(4), 0.0)
    assert result.grad_norm > 0.1
    assert trainer.gradients.flat.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_step_of_ignored_targets_only_changes_nothing_by_its_gradient(tmp_path: Path) -> None:
    trainer = _build(tmp_path)
    (batch,) = _batches(2)
    result = trainer.step([MicroBatch(batch.tokens, torch.full_like(batch.targets, IGNORE_INDEX), 0)], 0.0)
    assert (result.loss, result.grad_norm, result.num_targets) == (0.0, 0.0, 0)


def test_divergence_is_an_error_and_leaves_the_parameters_alone(tmp_path: Path) -> None:
    trainer = _build(tmp_path)
    with torch.no_grad():
        trainer.model.get_parameter("head.weight")[0, 0] = torch.inf
    before = {name: param.clone() for name, param in trainer.model.named_parameters()}
    with pytest.raises(PlaitError, match=r"training diverged: loss (nan|inf).*the parameters were not updated"):
        trainer.step(_batches(2), 0.01)
    assert all(torch.equal(param, before[name]) for name, param in trainer.model.named_parameters())
