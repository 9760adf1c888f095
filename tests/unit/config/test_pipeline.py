"""The section `pipeline`, and what a pipeline needs of the other sections."""

from typing import Any

import pytest
from pydantic import ValidationError

from plait.config import ParallelConfig, PipelineConfig, QuantizationConfig, RunConfig, TrainConfig, load_preset
from plait.config.load import load_run_config
from plait.errors import ConfigError
from plait.sharding import derive_parts, find_idle_stage, select_parts, share_layers

MODEL = load_preset("llama-tiny").model_copy(update={"num_layers": 6})


def _build(pp: int, num_micro_batches: int, **pipeline: Any) -> RunConfig:
    return RunConfig(
        model=MODEL,
        parallel=ParallelConfig(pp=pp),
        pipeline=PipelineConfig(**pipeline),
        train=TrainConfig(gradient_accumulation=num_micro_batches),
    )


@pytest.mark.parametrize(
    ("pp", "num_micro_batches", "pipeline", "message"),
    [
        (4, 3, {}, r"1f1b needs at least as many micro-batches as pipeline ranks, 4, and a step has 3"),
        (2, 5, {"schedule": "zero_bubble"}, r"zero_bubble: 5 micro-batches cannot be done in 2 equal rounds over 2"),
        (2, 4, {"schedule": "interleaved"}, r"pipeline\.stages_per_rank: .* the stages of a rank, and there is one"),
        (2, 4, {"stages_per_rank": 2}, r'pipeline\.stages_per_rank: schedule = "1f1b" has one stage a rank'),
        (9, 9, {}, r"parallel\.pp: 6 blocks cannot be cut into 9 stages: stage 6 would have nothing"),
        (2, 10**9, {}, r"1000000000 micro-batches through 2 stages are 2000000000 visits, .* at most 262144"),
        (1, 4, {"stages_per_rank": 2}, r"pipeline\.stages_per_rank: there is no pipeline"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    pp: int, num_micro_batches: int, pipeline: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        _build(pp, num_micro_batches, **pipeline)


def test_more_micro_batches_than_ranks_need_be_no_multiple_by_1f1b() -> None:
    """So the hint, for fewer, does not ask for one."""
    assert _build(2, 3).train.gradient_accumulation == 3
    with pytest.raises(ConfigError) as caught:
        load_run_config("llama-tiny", ["parallel.pp=2"])
    assert caught.value.hint == "set train.gradient_accumulation to at least 2"


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_other_schedules_take_fewer_micro_batches_than_ranks(schedule: str) -> None:
    assert _build(4, 2, schedule=schedule).pipeline.schedule == schedule


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train": TrainConfig(gradient_accumulation=2, compile=True)}, "a compiled block has one backward"),
        (
            {"quantization": QuantizationConfig(recipe="fp8_delayedscaling")},
            "a quantized linear reads its gradient once",
        ),
    ],
    ids=["compiled", "quantized"],
)
def test_what_has_one_backward_is_not_split(section: dict[str, Any], message: str) -> None:
    sections = {"train": TrainConfig(gradient_accumulation=2), **section}
    with pytest.raises(ValidationError, match=rf"pipeline\.schedule: {message}"):
        RunConfig(
            model=MODEL, parallel=ParallelConfig(pp=2), pipeline=PipelineConfig(schedule="zero_bubble"), **sections
        )


@pytest.mark.parametrize("num_layers", range(1, 20))
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_block_is_on_one_stage(num_layers: int, num_stages: int) -> None:
    shares = share_layers(num_layers, num_stages)
    assert [index for share in shares for index in share] == list(range(num_layers))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("num_layers", range(1, 8))
@pytest.mark.parametrize("num_stages", range(1, 12))
def test_an_idle_stage_is_found_without_cutting_anything(num_layers: int, num_stages: int) -> None:
    parts = derive_parts(num_layers, num_stages)
    idle = [part.index for part in parts if not part.layers and not (part.is_first or part.is_last)]
    assert find_idle_stage(num_layers, num_stages) == (idle[0] if idle else None)


def test_more_stages_than_fit_in_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 blocks cannot be cut into 1000000000 stages") as caught:
        load_run_config("llama-tiny", ["model.num_layers=6", "parallel.pp=1000000000", "pipeline.schedule=gpipe"])
    assert caught.value.hint == "use at most 8 stages"


def test_ends_count_as_blocks_where_blocks_do_not_divide_otherwise() -> None:
    """Llama 3: 126 blocks over 16 ranks of 8 stages, embedding and head on stages of their own."""
    parts = derive_parts(126, 128)
    assert not parts[0].layers
    assert not parts[-1].layers
    assert [len(layers) for layers in share_layers(7, 3)] == [2, 3, 2]


def test_a_rank_has_one_stage_of_each_round() -> None:
    assert [list(part.layers) for part in select_parts(8, 2, 2, 1)] == [[2, 3], [6, 7]]
