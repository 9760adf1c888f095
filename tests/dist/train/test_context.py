"""Training over context ranks is training on one: losses and gradient norms of whole runs, and checkpoints between."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.comm.mesh import build_mesh
from plait.config.data import DataConfig
from plait.config.axis.context import ContextConfig
from plait.config.run import RunConfig
from plait.sharding import MeshShape
from plait.train.loop import train
from tests.support.training import GPT, LLAMA, build_run, read_losses, stop_during

REORDERED = 5e-5
"""As in test_training.py: six steps carry what float32 sums in another order differ by on, and enlarge it."""

MODELS = {"llama": LLAMA, "gpt": GPT.model_copy(update={"attention_dropout": 0.0})}
"""With dropout of activations, whose masks are those of one rank."""


def build(folder: Path, name: str, model: str, *, packed: bool, context: dict[str, Any] | None = None, **rest: Any) -> RunConfig:
    run = build_run(folder, model=MODELS[model], name=name, **rest)
    changed: dict[str, Any] = {"context": ContextConfig(**context or {})}
    if packed:
        assert run.data is not None
        data = run.data.model_dump() | {"mask_documents": True, "end_of_text_id": 3}
        changed["data"] = DataConfig(**data)
    return run.model_copy(update=changed)


def run_on(run: RunConfig) -> None:
    """On each rank."""
    train(run, build_mesh(run.parallel.mesh_shape))


def stop_on_half_way(run: RunConfig) -> None:
    """On each rank: asked to stop during the third step."""
    with stop_during(3):
        run_on(run)


def read(run: RunConfig) -> list[float]:
    return [value for _, *values in read_losses(run) for value in values]


@pytest.fixture(scope="module", params=[("llama", False), ("gpt", True)], ids=["llama", "gpt-packed"])
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool, list[float]]:
    """A run of one rank."""
    model, packed = request.param
    folder = tmp_path_factory.mktemp("context")
    run = build(folder, "whole", model, packed=packed)
    train(run, build_mesh(MeshShape()))
    return folder, model, packed, read(run)


@pytest.mark.parametrize(
    ("parallel", "context", "rest"),
    [
        ({"cp": 2}, {}, {}),
        ({"cp": 3}, {"method": "all_gather", "order": "contiguous"}, {}),
        ({"cp": 2, "tp": 2}, {"method": "all_to_all"}, {}),
        ({"cp": 2, "dp_replicate": 2}, {}, {"micro_batch_size": 1, "gradient_accumulation": 2}),
    ],
    ids=["cp2", "cp3", "cp2-tp2", "cp2-dp2"],
)
def test_losses_are_those_of_one_rank(ranks, reference, parallel, context, rest) -> None:
    folder, model, packed, expected = reference
    name = "-".join(f"{axis}{degree}" for axis, degree in parallel.items())
    run = build(folder, name, model, packed=packed, context=context, parallel=parallel, **rest)
    ranks(run.parallel.mesh_shape.world_size).call(run_on, run=run)
    assert read(run) == pytest.approx(expected, rel=REORDERED)


def test_a_run_goes_on_over_other_context_ranks(ranks, reference) -> None:
    folder, model, packed, expected = reference
    first = build(folder, "moved", model, packed=packed, parallel={"cp": 3}, checkpoint_every=3)
    ranks(3).call(stop_on_half_way, run=first)
    assert len(read(first)) == len(expected) // 2
    second = build(folder, "moved", model, packed=packed, parallel={"cp": 2}, context={"order": "contiguous"})
    ranks(2).call(run_on, run=second)
    assert read(second) == pytest.approx(expected, rel=REORDERED)


def test_documents_do_change_the_loss(tmp_path: Path) -> None:
    runs = [build(tmp_path, name, "llama", packed=packed, steps=1) for name, packed in (("one", False), ("many", True))]
    for run in runs:
        train(run, build_mesh(MeshShape()))
    assert not np.allclose(read(runs[0]), read(runs[1]))
