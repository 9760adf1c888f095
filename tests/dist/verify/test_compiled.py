"""Steps of compiled blocks are those of the twin, on every axis, and move what is promised."""

import shutil
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.models import blocks
from plait.parallel.block.compile import compile_forward
from tests.support.rank_pool import COMPILING_S
from tests.support.verification import build_config, verify

pytestmark = pytest.mark.timeout(COMPILING_S)

ODD = ("model.vocab_size=257", "train.seq_len=8", "train.micro_batch_size=1", "train.gradient_accumulation=2")
COMPILED = "train.compile=true"


class QuickRanks:
    """Ranks whose blocks become graphs that are run as they are, by no kernels of their own."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    def call(self, function: Any, **kwargs: Any) -> list[Any]:
        """Run `function` on every rank."""
        return self._ranks.call(run_quickly, wrapped=function, arguments=kwargs)


def run_quickly(wrapped: Any, arguments: dict[str, Any]) -> Any:
    """On each rank."""
    torch._dynamo.reset()
    with patch.object(blocks, "compile_forward", partial(compile_forward, backend="aot_eager")):
        return wrapped(**arguments)


def check(pool, source, tp, *overrides, is_quick=True):
    asked = (*ODD, COMPILED, *overrides)
    pool = pool(build_config(source, tp, *asked).parallel.mesh_shape.world_size)
    report = verify(QuickRanks(pool) if is_quick else pool, source, tp, *asked)
    assert report.passed, report.failures


@pytest.mark.parametrize(
    ("source", "tp", "axes"),
    [
        ("gpt-tiny", 1, ("parallel.pp=2",)),
        ("llama-tiny-gqa2", 2, ("parallel.pp=2",)),
        ("gpt-tiny", 1, ("parallel.pp=2", "parallel.dp_shard=2")),
        ("gpt-tiny", 2, ("parallel.dp_shard=2",)),
        ("gpt-tiny", 2, ("parallel.dp_replicate=2",)),
    ],
)
def test_a_step_of_compiled_blocks_is_that_of_the_twin(compiling_ranks, source, tp, axes):
    check(compiling_ranks, source, tp, *axes)


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
def test_stages_of_compiled_blocks_in_other_schedules(compiling_ranks, schedule):
    stages = 2 if schedule == "interleaved" else 1
    pipeline = (f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}", "train.gradient_accumulation=4")
    check(compiling_ranks, "gpt-tiny", 1, "parallel.pp=2", "model.num_layers=4", *pipeline)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++, and there is no g++")
def test_stages_of_blocks_that_inductor_compiles(compiling_ranks):
    check(compiling_ranks, "gpt-tiny", 1, "parallel.pp=2", "model.num_layers=2", is_quick=False)
