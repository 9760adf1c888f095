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
    ],
)
def test_a_step_computed_again_is_that_of_the_twin(ranks, source, recompute, axes, tp):
    """What is repeated over cp, in a stage and under FSDP is promised too."""
    asked = (*ODD, f"train.recompute={recompute}", *(f"parallel.{axis}" for axis in axes))
    world_size = build_config(source, tp, *asked).parallel.mesh_shape.world_size
    report = verify(ranks(world_size), source, tp, *asked)
    assert report.passed, report.failures
