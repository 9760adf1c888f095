"""A model whose sequences are cut over context ranks is its unsharded fp64 twin, whatever brings its tokens together."""

import pytest

from tests.support.verification import verify

ODD = ("model.vocab_size=257", "train.seq_len=11", "model.mlp_width=97")
"""Eleven tokens: no degree divides them."""
GPT = ("model.attention_dropout=0.0", *ODD)
"""With dropout of activations, whose masks follow the tokens, and learned positions."""


def check(ranks, source, mesh, *overrides):
    degrees = {"tp": 1, **mesh}
    world = 1
    for degree in degrees.values():
        world *= degree
    asked = tuple(f"parallel.{axis}={degree}" for axis, degree in degrees.items() if axis != "tp")
    report = verify(ranks(world), source, degrees["tp"], *asked, *overrides)
    assert report.passed, report.failures
    return report


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_method_and_order_equals_the_unsharded_model(ranks, cp, method, order):
    report = check(ranks, "llama-tiny", {"cp": cp}, f"context.method={method}", f"context.order={order}", *ODD)
    assert {trace.what for trace in report.traces} == {"collectives"} | ({"ring messages"} if method == "ring" else set())


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 3}, {"cp": 2, "tp": 2}], ids=str)
def test_learned_positions_and_dropout_follow_the_tokens(ranks, mesh):
    check(ranks, "gpt-tiny", mesh, *GPT)
