"""Every pair of axes, and six triples: loss, gradients, norm and an update are those of the dense fp64 twin."""

from itertools import combinations

import pytest

from plait.sharding import AXES
from tests.support.verification import build_config, verify

ODD = (
    "model.vocab_size=257",
    "model.mlp_width=97",
    "model.num_layers=3",
    "train.seq_len=13",
    "train.micro_batch_size=1",
    "train.gradient_accumulation=2",
)
"""Nothing of this divides by a degree."""

TRIPLES = (
    ("dp_replicate", "dp_shard", "tp"),
    ("dp_shard", "cp", "tp"),
    ("dp_replicate", "cp", "tp"),
    ("pp", "cp", "tp"),
    ("pp", "dp_shard", "tp"),
    ("pp", "dp_shard", "cp"),
)


def check(ranks, axes, source, *overrides):
    degrees = [f"parallel.{axis}=2" for axis in axes if axis != "tp"]
    tp = 2 if "tp" in axes else 1
    asked = (*ODD, *degrees, *overrides)
    report = verify(ranks(build_config(source, tp, *asked).parallel.mesh_shape.world_size), source, tp, *asked)
    assert report.passed, report.failures


@pytest.mark.parametrize("axes", list(combinations(AXES, 2)), ids="-".join)
def test_pair(ranks, axes):
    check(ranks, axes, "llama-tiny-gqa2")


def test_stage_of_nothing_but_the_head_beside_context_ranks(ranks):
    check(ranks, ("pp", "cp"), "llama-tiny-gqa2", "model.num_layers=1")


@pytest.mark.parametrize("axes", TRIPLES, ids="-".join)
def test_triple(ranks, axes):
    check(ranks, axes, "llama-tiny-gqa2")


@pytest.mark.parametrize("axes", [("dp_shard", "cp", "tp"), ("pp", "dp_shard", "tp")], ids="-".join)
def test_triple_overlapped(ranks, axes):
    check(ranks, axes, "llama-tiny-gqa2", "overlap=full")
