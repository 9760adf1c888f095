"""Steps that compute again in backward, on every axis, equal the twin that does not, and move what is promised."""

import pytest

from tests.support.verification import build_config, verify

ODD = ("model.vocab_size=257", "train.seq_len=8", "train.micro_batch_size=1", "train.gradient_accumulation=2")


@pytest.mark.parametrize(
    ("source", "recompute", "axes", "tp"),
    [
        ("gpt-tiny", "full", ("dp_shard=2",), 2),
        ("gpt-tiny", "selective", ("dp_shard=2",), 1),
        ("llama-tiny-gqa2", "full", ("cp=2",), 2),
        ("llama-tiny-gqa2", "selective", ("cp=2",), 1),
        ("gpt-tiny", "full", ("pp=2",), 2),
        ("gpt-tiny", "selective", ("pp=2",), 1),
        ("llama-tiny-gqa2", "full", ("pp=2",), 1),
        ("gpt-tiny", "full", ("pp=2", "dp_shard=2"), 1),
        ("llama-tiny-gqa2", "selective", ("pp=2", "dp_shard=2"), 1),
        ("llama-tiny-gqa2", "full", ("pp=2", "cp=2"), 1),
    ],
)
def test_a_step_computed_again_is_that_of_the_twin(ranks, source, recompute, axes, tp):
    """What is repeated over cp, in a stage and under FSDP is promised too."""
    asked = (*ODD, f"train.recompute={recompute}", *(f"parallel.{axis}" for axis in axes))
    world_size = build_config(source, tp, *asked).parallel.mesh_shape.world_size
    report = verify(ranks(world_size), source, tp, *asked)
    assert report.passed, report.failures


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_micro_batches_that_are_under_way_together_are_computed_again_each_as_it_was(ranks, recompute, schedule):
    """Four of them, with masks of their own; the stages are those of four blocks."""
    stages = 2 if schedule == "interleaved" else 1
    asked = ("model.num_layers=4", "train.gradient_accumulation=4", f"train.recompute={recompute}")
    pipeline = ("parallel.pp=2", f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}")
    report = verify(ranks(2), "gpt-tiny", 1, "train.micro_batch_size=1", *asked, *pipeline)
    assert report.passed, report.failures


def test_quantized_blocks_are_computed_again_under_fsdp(ranks):
    """To the same numbers: histories of amax are those of the forward pass that was first."""
    small = ("model.width=128", "model.num_heads=4", "model.mlp_width=192", "train.seq_len=32", "model.vocab_size=256")
    kept = ("quantization.keep_first=0", "quantization.keep_last=0", "model.num_layers=1")
    asked = (*small, *kept, "quantization=fp8_delayedscaling", "train.recompute=full", "parallel.dp_shard=2")
    report = verify(ranks(2), "llama-tiny", 1, *asked)
    assert report.passed, report.failures
