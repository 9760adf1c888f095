"""Steps on meshes with pipeline stages are those of the unsharded fp64 twin; what is sent is what was promised."""

import pytest

from tests.support.verification import build_config, verify

ODD = (
    "model.vocab_size=257",
    "train.seq_len=7",
    "model.mlp_width=97",
    "train.micro_batch_size=1",
    "model.num_layers=5",
    "train.gradient_accumulation=4",
)
"""Nothing of this divides by a degree, the blocks neither."""

TIED, UNTIED = "gpt-tiny", "llama-tiny-gqa2"

SCHEDULES = {
    "1f1b": ("pipeline.schedule=1f1b",),
    "gpipe": ("pipeline.schedule=gpipe",),
    "interleaved": ("pipeline.schedule=interleaved", "pipeline.stages_per_rank=2"),
    "zero_bubble": ("pipeline.schedule=zero_bubble",),
    "zero_bubble_2": ("pipeline.schedule=zero_bubble", "pipeline.stages_per_rank=2"),
}


def check(ranks, source, *overrides, **degrees):
    axes = [f"parallel.{axis}={degree}" for axis, degree in degrees.items() if axis != "tp"]
    asked, tp = (*ODD, *axes, *overrides), degrees.get("tp", 1)
    world_size = build_config(source, tp, *asked).parallel.mesh_shape.world_size
    report = verify(ranks(world_size), source, tp, *asked)
    assert report.passed, report.failures
    assert {trace.rank for trace in report.traces if trace.what == "transfers"} == set(range(world_size))


@pytest.mark.parametrize("source", [TIED, UNTIED])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_takes_the_step_of_all_layers(ranks, source, schedule):
    check(ranks, source, *schedule, pp=2)


@pytest.mark.parametrize("source", [TIED, UNTIED])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_four_stages(ranks, source, schedule):
    """Ranks between the ends have no part in the sum of a tied table."""
    check(ranks, source, *SCHEDULES[schedule], pp=4)


@pytest.mark.parametrize("source", [TIED, UNTIED])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_stages_of_several_ranks(ranks, source, schedule):
    """A rank sends its own tokens; with backward split, gathers that both halves need are there twice."""
    check(ranks, source, *schedule, pp=2, tp=2)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_stages_of_several_ranks_in_all_reduce_mode(ranks, schedule):
    check(ranks, TIED, *SCHEDULES[schedule], "parallel.sequence_parallel=false", pp=2, tp=2)


def test_shared_kv_heads_on_stages(ranks):
    """Ranks that hold one KV head are a group of their own, which stages without attention start as well."""
    check(ranks, UNTIED, *SCHEDULES["zero_bubble"], "model.num_layers=2", pp=2, tp=4)


@pytest.mark.parametrize("source", [TIED, UNTIED])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_copies_of_a_pipeline(ranks, source, schedule):
    """Masks go by the token of the run, whichever copy and micro-batch it is in."""
    check(ranks, source, *SCHEDULES[schedule], pp=2, dp_replicate=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_2"])
def test_three_axes(ranks, schedule):
    check(ranks, TIED, *SCHEDULES[schedule], pp=2, dp_replicate=2, tp=2)


@pytest.mark.parametrize("source", [TIED, UNTIED])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_stages_that_share_out_their_parameters(ranks, source, schedule):
    """Gathered once a step, and gradients reduced once, however many passes go on at a time; both halves of backward
    find the parameters that forward has seen."""
    check(ranks, source, *schedule, pp=2, dp_shard=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_of_stages_that_are_shared_out_add_up_in_the_format_of_the_masters(ranks, schedule):
    asked = ("model.num_layers=2", "precision.compute=bfloat16")
    check(ranks, UNTIED, *SCHEDULES[schedule], *asked, pp=2, dp_shard=2)


def test_a_rank_between_the_ends_shares_out_blocks_alone(ranks):
    check(ranks, TIED, *SCHEDULES["zero_bubble"], pp=4, dp_shard=2)


@pytest.mark.parametrize(
    "degrees",
    [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2}],
    ids=["tp", "cp", "hsdp"],
)
def test_stages_that_share_out_their_parameters_on_three_axes(ranks, degrees):
    asked = ("model.attention_dropout=0.0",) if "cp" in degrees else ()
    check(ranks, TIED, *SCHEDULES["zero_bubble_2"], *asked, pp=2, **degrees)


def test_a_stage_may_be_the_embedding_alone(ranks):
    """Six blocks over eight stages, as Llama 3 has its ends on stages of their own."""
    check(
        ranks,
        UNTIED,
        "model.num_layers=6",
        "pipeline.schedule=interleaved",
        "pipeline.stages_per_rank=4",
        pp=2,
    )


def test_overlapped_linears_on_stages(ranks):
    check(ranks, TIED, *SCHEDULES["1f1b"], "overlap=full", pp=2, tp=2)
    check(ranks, TIED, *SCHEDULES["zero_bubble"], "overlap=full", pp=2, tp=2)


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "nvfp4"])
def test_quantized_stages(ranks, recipe):
    """The blocks that are kept are those of the whole model; each stage has histories of its own linears."""
    small = ("model.width=128", "model.num_heads=4", "model.mlp_width=192", "train.seq_len=32", "model.vocab_size=256")
    check(ranks, "llama-tiny", *small, f"quantization={recipe}", pp=2, tp=2)


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "mxfp8"])
def test_quantized_stages_that_share_out_their_parameters(ranks, recipe):
    small = ("model.width=128", "model.num_heads=4", "model.mlp_width=192", "train.seq_len=32", "model.vocab_size=256")
    kept = ("quantization.keep_first=0", "quantization.keep_last=0")
    fewer = ("model.num_layers=2", "train.gradient_accumulation=2")
    check(ranks, "llama-tiny", *small, *kept, *fewer, f"quantization={recipe}", pp=2, dp_shard=2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_stages_of_cut_sequences(ranks, schedule, method):
    """What a stage sends are the tokens of its context rank."""
    asked = ("train.seq_len=16", "model.attention_dropout=0.0", f"context.method={method}")
    check(ranks, TIED, *SCHEDULES[schedule], *asked, pp=2, cp=2)
