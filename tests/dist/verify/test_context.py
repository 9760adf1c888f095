"""A model whose sequences are cut over context ranks is its unsharded fp64 twin, whatever brings its tokens together."""

from math import prod

import pytest

from tests.support.verification import verify

ODD = ("model.vocab_size=257", "train.seq_len=11", "model.mlp_width=97")
"""Eleven tokens: no degree divides them."""
GPT = ("model.attention_dropout=0.0", *ODD)
"""With dropout of activations, whose masks follow the tokens, and learned positions."""
PACKED = ('data.kind="tokens"', 'data.paths=["none.npy"]', "data.end_of_text_id=0", "data.mask_documents=true")


def check(ranks, source, mesh, *overrides, sequence_parallel=True):
    asked = tuple(f"parallel.{axis}={degree}" for axis, degree in mesh.items() if axis != "tp")
    pool, tp = ranks(prod(mesh.values())), mesh.get("tp", 1)
    report = verify(pool, source, tp, *asked, *overrides, sequence_parallel=sequence_parallel)
    assert report.passed, report.failures
    return report


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_method_and_order_equals_the_unsharded_model(ranks, cp, method, order):
    report = check(ranks, "llama-tiny", {"cp": cp}, f"context.method={method}", f"context.order={order}", *ODD)
    messages = {"ring messages"} if method == "ring" else set()
    assert {trace.what for trace in report.traces} == {"collectives"} | messages


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 3}, {"cp": 2, "tp": 2}], ids=str)
def test_learned_positions_and_dropout_follow_the_tokens(ranks, mesh):
    check(ranks, "gpt-tiny", mesh, *GPT)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
def test_with_tensor_parallelism(ranks, method, sequence_parallel):
    """Own tokens of each sequence are cut further over tp, in whole or in part of a sequence."""
    mesh = {"cp": 2, "tp": 2}
    check(ranks, "llama-tiny", mesh, f"context.method={method}", *ODD, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_beneath_collective_gemms(ranks, method):
    check(ranks, "llama-tiny", {"cp": 2, "tp": 2}, "overlap=full", f"context.method={method}", *ODD)


def test_with_kv_heads_that_ranks_share(ranks):
    check(ranks, "llama-tiny-gqa2", {"cp": 2, "tp": 4}, "model.qkv_bias=true", *ODD)


def test_with_copies_that_read_other_sequences(ranks):
    check(ranks, "llama-tiny", {"cp": 2, "dp_replicate": 2}, "train.gradient_accumulation=2", *ODD)


@pytest.mark.parametrize("source", ["llama-tiny", "gpt-tiny"])
def test_three_axes(ranks, source):
    mesh = {"cp": 2, "tp": 2, "dp_replicate": 2}
    check(ranks, source, mesh, *(GPT if source == "gpt-tiny" else ODD))


@pytest.mark.parametrize("mesh", [{"pp": 2, "cp": 2}, {"pp": 2, "cp": 2, "tp": 2}], ids=str)
def test_in_the_stages_of_a_pipeline(ranks, mesh):
    """Micro-batches are under way together, each with documents of its own."""
    check(ranks, "gpt-tiny", mesh, "train.gradient_accumulation=4", *GPT, *PACKED)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "cp": 2, "tp": 2}], ids=str)
def test_with_parameters_that_ranks_share_out(ranks, mesh):
    """Over dp_shard and cp as one axis."""
    check(ranks, "gpt-tiny", mesh, *GPT, "train.gradient_accumulation=2")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_computed_again_in_backward(ranks, recompute):
    overrides = (f"train.recompute={recompute}", "train.gradient_accumulation=2")
    check(ranks, "gpt-tiny", {"cp": 2, "tp": 2}, *overrides, *GPT, *PACKED)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("source", ["llama-tiny", "gpt-tiny"])
def test_packed_documents_are_attended_one_by_one(ranks, source, method, order):
    model = GPT if source == "gpt-tiny" else ODD
    how = (f"context.method={method}", f"context.order={order}", "train.gradient_accumulation=2")
    check(ranks, source, {"cp": 3}, *how, *model, *PACKED)


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_packed_documents_on_other_meshes(ranks, mesh):
    """At cp = 1, too; with dropout of probabilities, which exist there."""
    source = "llama-tiny" if "cp" in mesh else "gpt-tiny"
    check(ranks, source, mesh, *ODD, *PACKED)
