from typing import Any

import pytest
from pydantic import ValidationError

from plait.config import DataConfig, ParallelConfig, PrecisionConfig, RunConfig, TrainConfig, load_preset
from plait.config.load import load_run_config
from plait.errors import ConfigError
from plait.sharding import MeshShape

TINY = load_preset("llama-tiny")


@pytest.mark.parametrize("tp", range(1, 9))
def test_every_degree_up_to_the_query_heads_is_accepted(tp: int) -> None:
    """FIELD 3.23: uneven by whole KV groups; 3.22: beyond the KV heads they are replicated."""
    assert RunConfig(model=TINY, parallel=ParallelConfig(tp=tp)).parallel.mesh_shape == MeshShape(tp=tp)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 9, r"parallel\.tp: layers\.\*\.attention\.wq \[N\*H, D\]: 8 query heads .* over 9 ranks"),
        ({"mlp_width": 3}, 4, r"parallel\.tp: layers\.\*\.mlp\.w_up \[F, D\]: 3 features .* over 4 ranks"),
        ({"vocab_size": 5}, 6, r"parallel\.tp: embedding and head \[V, D\]: 5 features .* over 6 ranks"),
    ],
    ids=["heads", "mlp", "vocabulary"],
)
def test_degree_that_cannot_be_realised_is_refused(changes: dict[str, int], tp: int, message: str) -> None:
    """FIELD 3.22: decided at plan time, not in forward."""
    model = TINY.model_validate({**TINY.model_dump(), **changes})
    with pytest.raises(ValidationError, match=message):
        RunConfig(model=model, parallel=ParallelConfig(tp=tp))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"recompute": "full", "compile": True}}, r"what a compiled block keeps is the compiler's choice"),
        (
            {"train": {"recompute": "full"}, "pipeline": {"schedule": "zero_bubble"}},
            r"whose two halves of backward would each compute it again",
        ),
    ],
    ids=["compiled", "split backward"],
)
def test_recompute_that_nothing_runs_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=rf"train\.recompute: .*{message}"):
        RunConfig.model_validate({"model": TINY, **sections})


def test_sequence_parallel_needs_a_token_for_every_rank() -> None:
    train = TrainConfig(seq_len=3)
    with pytest.raises(ValidationError, match=r"3 tokens of a micro-batch cannot be sharded over 4 ranks"):
        RunConfig(model=TINY, parallel=ParallelConfig(tp=4), train=train)
    RunConfig(model=TINY, parallel=ParallelConfig(tp=4, sequence_parallel=False), train=train)
    RunConfig(model=TINY, parallel=ParallelConfig(tp=4), train=TrainConfig(seq_len=3, micro_batch_size=2))


def test_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"train\.seq_len: is more than model\.max_seq_len = 64"):
        RunConfig(model=TINY, train=TrainConfig(seq_len=65))
    assert RunConfig(model=TINY, train=TrainConfig(seq_len=64)).seq_len == 64


def test_tokens_of_a_step_count_every_sequence() -> None:
    train = TrainConfig(seq_len=10, micro_batch_size=3, gradient_accumulation=4)
    config = RunConfig(model=TINY, parallel=ParallelConfig(dp_replicate=2, tp=2), train=train)
    assert config.tokens_per_micro_batch == 30
    assert config.tokens_per_step == 240


def test_warm_up_ends_by_the_last_step() -> None:
    assert RunConfig(model=TINY, train=TrainConfig(steps=10, warmup_steps=10)).train.warmup_steps == 10
    with pytest.raises(ValidationError, match=r"train\.warmup_steps: is more than train\.steps = 10"):
        RunConfig(model=TINY, train=TrainConfig(steps=10, warmup_steps=11))


def test_sums_are_carried_in_the_compute_format_unless_said_otherwise() -> None:
    """FIELD 3.18: the reduction dtype is one stated policy."""
    assert PrecisionConfig(compute="bfloat16").reduce_dtype == "bfloat16"
    assert PrecisionConfig(compute="bfloat16", reduce="float32").reduce_dtype == "float32"


def test_text_needs_a_tokenizer_and_tokens_do_not() -> None:
    with pytest.raises(ValidationError, match=r'tokenizer: is required: data of kind "text"'):
        DataConfig(kind="text", paths=("a.txt",))
    assert DataConfig(kind="tokens", paths=("a.bin",)).tokenizer is None


def test_one_path_needs_no_list() -> None:
    assert DataConfig.model_validate({"kind": "tokens", "paths": "a.bin"}).paths == ("a.bin",)


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(ValidationError, match="paths: is empty"):
        DataConfig(kind="tokens", paths=())


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden"])
def test_name_of_a_run_stays_inside_its_folder(name: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        RunConfig(model=TINY, name=name)


def test_run_survives_json() -> None:
    config = RunConfig(model=TINY, data=DataConfig(kind="tokens", paths=("a.bin", "b.bin")))
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_blocks_of_pipeline_stages_are_not_freed_between_passes() -> None:
    train = TrainConfig(gradient_accumulation=2)
    assert not RunConfig(model=TINY, parallel=ParallelConfig(pp=2, dp_shard=2), train=train).parallel.frees_blocks
    assert ParallelConfig(dp_shard=2).frees_blocks
    with pytest.raises(ValidationError, match=r"after_forward: .*\(parallel\.pp = 2\) are gathered once a step"):
        RunConfig(model=TINY, parallel=ParallelConfig(pp=2, dp_shard=2, reshard_after_forward=True), train=train)


def test_the_data_parallel_degree_is_that_of_both_axes() -> None:
    assert ParallelConfig(dp_replicate=3, dp_shard=2, cp=5).dp == 6


def test_the_degree_that_became_two_is_named() -> None:
    with pytest.raises(ValidationError, match=r"dp: is now two degrees: dp_replicate .* times dp_shard"):
        ParallelConfig.model_validate({"dp": 2})


@pytest.mark.parametrize(
    ("override", "most"),
    [
        ("train.timeout_s=1e30", "1000000000"),
        ("train.start_timeout_s=1e30", "1000000000"),
        ("parallel.cp=1025", "1024"),
        ("parallel.tp=1025", "1024"),
    ],
)
def test_what_no_machine_can_do_is_refused_with_the_most_it_can(override: str, most: str) -> None:
    with pytest.raises(ConfigError, match=most):
        load_run_config("llama-tiny", [override])
