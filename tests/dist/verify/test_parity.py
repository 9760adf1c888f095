"""Sharded models are their unsharded fp64 twins: every number of a step, and every collective (FIELD 3.5, 3.21)."""

import pytest

from tests.support.verification import verify

ODD = ("model.vocab_size=257", "train.seq_len=7", "model.mlp_width=97")
"""Nothing of this divides by a degree: 14 tokens, 257 vocabulary rows, 97 mlp columns."""

CASES = {
    "llama": ("llama-tiny", ()),
    "llama-odd": ("llama-tiny", ODD),
    "llama-smoothed": ("llama-tiny", ("train.label_smoothing=0.1", "train.z_loss=1e-3", *ODD)),
    "llama3-rope": (
        "llama-tiny",
        (
            "model.rope_scaling.factor=8.0",
            "model.rope_scaling.low_freq_factor=1.0",
            "model.rope_scaling.high_freq_factor=4.0",
            "model.rope_scaling.original_max_seq_len=32",
        ),
    ),
    "llama-gqa2-odd": ("llama-tiny-gqa2", ODD),
    "qwen-gqa2": ("llama-tiny-gqa2", ("model.qkv_bias=true",)),
    "qwen-odd": ("qwen-tiny", ODD),
    "smollm-odd": ("smollm-tiny", ODD),
    "gpt": ("gpt-tiny", ()),
    "gpt-odd": ("gpt-tiny", ("model.vocab_size=257", "train.seq_len=7", "model.mlp_width=97")),
    "gpt-untied": ("gpt-tiny", ("model.tied_embeddings=false", "train.max_grad_norm=0.0")),
}


def check(ranks, case, tp, sequence_parallel):
    source, overrides = CASES[case]
    report = verify(ranks(tp), source, tp, *overrides, sequence_parallel=sequence_parallel)
    assert report.passed, report.failures
    return report


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_sharded_model_equals_unsharded(ranks, case, tp, sequence_parallel):
    """FIELD 3.22, 3.23, 3.24, 3.25: heads, vocabulary, mlp columns and tokens are cut unevenly and exactly."""
    check(ranks, case, tp, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("case", ["llama-odd", "llama-gqa2-odd", "qwen-gqa2", "gpt-odd"])
def test_sharded_model_equals_unsharded_on_four_ranks(ranks, case, sequence_parallel):
    """FIELD 3.10, 3.22: with two KV heads on four ranks each is held twice and its gradient summed."""
    check(ranks, case, 4, sequence_parallel)


def test_sharded_model_equals_unsharded_on_eight_ranks(ranks):
    """One query head a rank, KV heads held four times."""
    report = check(ranks, "qwen-gqa2", 8, True)
    assert len(report.traces) == 8


def test_one_rank_is_the_unsharded_model_and_issues_nothing(ranks):
    report = check(ranks, "gpt", 1, True)
    assert [trace.num_promised for trace in report.traces] == [0]


def test_report_covers_every_parameter_and_both_ends(ranks):
    report = check(ranks, "qwen-odd", 2, True)
    names = {"embedding.weight", "norm.weight", "head.weight"}
    for layer in range(2):
        block = f"layers.{layer}"
        names |= {f"{block}.attention_norm.weight", f"{block}.mlp_norm.weight", f"{block}.attention.wo.weight"}
        names |= {f"{block}.attention.{name}.{kind}" for name in ("wq", "wk", "wv") for kind in ("weight", "bias")}
        names |= {f"{block}.mlp.{name}.weight" for name in ("w_gate", "w_up", "w_down")}
    for quantity in ("gradient", "update"):
        assert {error.name for error in report.errors if error.quantity == quantity} == names
    assert {error.quantity for error in report.errors} == {"logits", "loss", "gradient", "gradient norm", "update"}


def test_sharded_error_is_like_that_of_a_reordering(ranks):
    """FIELD 3.21: a reader can judge the error, because rounding alone moves the unsharded model about as far."""
    report = check(ranks, "llama", 2, True)
    by_rounding = max(error.reordering_error for error in report.errors)
    assert by_rounding / 4 < max(error.error for error in report.errors) < 4 * by_rounding


def test_bfloat16_sums_of_a_float32_model_are_verified_by_their_own_budget(ranks):
    """FIELD 3.18: the reduction dtype is the one asked for; it is in the trace, and its rounding in the error."""
    report = verify(ranks(2), "llama-tiny", 2, "precision.reduce=bfloat16")
    assert report.passed, report.failures
    assert report.budget.dtype == "bfloat16"
    assert max(error.error for error in report.errors) > 1e-4


def test_bfloat16_model_is_verified(ranks):
    report = verify(ranks(2), "llama-tiny", 2, "precision.compute=bfloat16", "model.num_layers=1")
    assert report.passed, report.failures
