"""Steps on meshes of several axes are those of the unsharded fp64 twin that is given the sequences of all ranks."""

import pytest

from tests.support.verification import build_config, verify

ODD = ("model.vocab_size=257", "train.seq_len=7", "model.mlp_width=97", "train.micro_batch_size=1")
"""Nothing of this divides by a degree."""

SOURCES = {"llama": "llama-tiny-gqa2", "qwen": "qwen-tiny", "smollm": "smollm-tiny", "gpt": "gpt-tiny"}


def check(ranks, source, *overrides, **degrees):
    axes = [f"parallel.{axis}={degree}" for axis, degree in degrees.items() if axis != "tp"]
    asked, tp = (*ODD, *axes, *overrides), degrees.get("tp", 1)
    world_size = build_config(source, tp, *asked).parallel.mesh_shape.world_size
    report = verify(ranks(world_size), source, tp, *asked)
    assert report.passed, report.failures
    assert len({trace.rank for trace in report.traces}) == world_size
    return report


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(("dp_replicate", "tp"), [(2, 1), (2, 2), (4, 1), (2, 4)])
def test_copies_of_a_model_see_one_batch_together(ranks, source, dp_replicate, tp):
    """Dropout masks, targets that count, the sum of gradients: of all sequences of the step."""
    report = check(ranks, source, "train.gradient_accumulation=2", dp_replicate=dp_replicate, tp=tp)
    assert report.subject["batch"] == 2 * dp_replicate


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "nvfp4"])
def test_each_micro_batch_of_each_copy_has_its_own_scales(ranks, recipe):
    small = ("model.width=128", "model.num_heads=4", "model.mlp_width=192", "train.seq_len=32", "model.vocab_size=256")
    kept = ("quantization.keep_first=0", "quantization.keep_last=0", "train.gradient_accumulation=2")
    check(ranks, "llama-tiny", *small, *kept, f"quantization={recipe}", dp_replicate=2, tp=2)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(
    ("dp_replicate", "dp_shard", "tp"), [(1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 4, 2), (2, 2, 2)]
)
def test_parameters_that_data_parallel_ranks_share_out(ranks, source, dp_replicate, dp_shard, tp):
    """Rows that do not divide by dp_shard, on every axis that FSDP is used with."""
    overrides = ("train.gradient_accumulation=2",)
    check(ranks, source, *overrides, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)


WAYS = {
    "kept between forward and backward": ("parallel.reshard_after_forward=false", "train.gradient_accumulation=2"),
    "blocks computed again": ("train.recompute=full",),
    "attention computed again": ("train.recompute=selective",),
    "gathered in bfloat16": ("precision.compute=bfloat16", "train.gradient_accumulation=2"),
    "sums of float32 gradients": ("precision.compute=bfloat16", "precision.reduce=float32"),
    "overlapped": ("overlap=full", "overlap.transport=ring", "overlap.chunks=2"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_shared_out_parameters_in_every_way_of_running_a_block(ranks, way):
    """What linears keep of their weights for backward is there again when backward comes to it."""
    num_layers = 1 if "precision.compute=bfloat16" in way else 2
    check(ranks, "llama-tiny", "train.seq_len=8", f"model.num_layers={num_layers}", *way, dp_shard=2, tp=2)


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "mxfp8"])
def test_gathered_weights_are_quantized_as_whole_ones_are(ranks, recipe):
    small = ("model.width=128", "model.num_heads=4", "model.mlp_width=192", "train.seq_len=64", "model.vocab_size=256")
    kept = ("quantization.keep_first=0", "quantization.keep_last=0", "model.num_layers=1")
    check(ranks, "llama-tiny", *small, *kept, f"quantization={recipe}", dp_shard=2, tp=2)


@pytest.mark.parametrize("recipe", ["fp8_currentscaling", "nvfp4"])
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=["fsdp", "hsdp"])
def test_quantized_linears_of_one_tp_rank_find_the_weights_that_were_gathered(ranks, recipe, degrees):
    small = ("model.width=128", "model.num_heads=4", "model.mlp_width=192", "train.seq_len=32", "model.vocab_size=256")
    kept = ("quantization.keep_first=0", "quantization.keep_last=0", "train.gradient_accumulation=2")
    check(ranks, "llama-tiny", *small, *kept, f"quantization={recipe}", **degrees)
