"""Norms, dropout, embeddings and losses."""

import pytest

from plait.config.model import GptConfig
from plait.contract.loss import derive_cross_entropy, derive_entropy, derive_log_prob
from plait.contract.model import derive_model
from plait.contract.op import Op
from plait.contract.parameter import build_vocab_split
from plait.contract.setting import Setting
from plait.contract.step import list_collectives
from plait.sharding import Invariant, Shard

GPT = GptConfig(num_layers=1, width=8, num_heads=2, vocab_size=33, max_seq_len=16, dropout=0.1)


def derive_ops(setting: Setting, config: GptConfig = GPT) -> dict[str, Op]:
    return {op.name: op for op in derive_model(config, setting).ops}


def test_a_norm_sums_weight_and_bias_gradients_in_one_collective() -> None:
    norm = derive_ops(Setting(1, 7, tp=2))["norm"]
    assert norm.forward == ()
    assert [(c.kind, c.axis, c.shape) for c in list_collectives(norm.backward)] == [("all_reduce", "tp", (16,))]


def test_a_norm_in_all_reduce_mode_moves_nothing() -> None:
    """Every rank has all tokens, so the gradients are the same already."""
    norm = derive_ops(Setting(1, 7, tp=2, sequence_parallel=False))["norm"]
    assert (norm.forward, norm.backward) == ((), ())
    assert norm.inputs[0].layout.placement == Invariant()


@pytest.mark.parametrize(("rank", "tokens"), [(0, 4), (1, 3)])
def test_seven_tokens_over_two_ranks(rank: int, tokens: int) -> None:
    """FIELD 3.25: uneven token splits; the global length is a carried fact."""
    ops = derive_ops(Setting(1, 7, tp=2, rank=rank))
    assert ops["norm"].saved[0].shape == (tokens, 8)
    assert ops["embedding_dropout"].saved[0].shape == (tokens, 8)
    assert [c.shape for c in list_collectives(ops["embedding"].forward)] == [(7, 8)]


def test_positions_are_looked_up_for_own_tokens_and_their_gradient_is_summed() -> None:
    positions = derive_ops(Setting(1, 7, tp=2))["position_embedding"]
    assert positions.outputs[0].layout.placement == Shard(0)
    assert [(c.kind, c.shape) for c in list_collectives(positions.backward)] == [("all_reduce", (16 * 8,))]


def test_dropout_of_probability_zero_is_no_operation() -> None:
    assert not [
        name for name in derive_ops(Setting(1, 7), GPT.model_copy(update={"dropout": 0.0})) if "dropout" in name
    ]


def test_label_smoothing_adds_one_sum_to_the_same_collective() -> None:
    """FIELD 3.1: it spreads over the true vocabulary, so the sum of all logits is needed too."""
    setting, cut = Setting(1, 7, tp=2), build_vocab_split(33, 2)
    plain, smoothed = (
        list_collectives(derive_cross_entropy(setting, cut, label_smoothing=smoothing).forward)
        for smoothing in (False, True)
    )
    assert [c.shape for c in plain] == [(7,), (2, 7)]
    assert [c.shape for c in smoothed] == [(7,), (3, 7)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_statistics_of_a_loss_are_float32_whatever_sums_are_carried_in(dtype: str) -> None:
    setting = Setting(1, 7, tp=2, dtype=dtype, reduce_dtype="bfloat16")  # type: ignore[arg-type]
    for op in (derive_cross_entropy, derive_log_prob, derive_entropy):
        assert {c.dtype for c in list_collectives(op(setting, build_vocab_split(33, 2)).forward)} == {"float32"}


def test_a_loss_keeps_the_logits_of_its_rank_in_their_own_dtype() -> None:
    loss = derive_cross_entropy(Setting(1, 7, tp=2, rank=1), build_vocab_split(33, 2))
    assert [(s.name, s.shape, s.dtype) for s in loss.saved][:2] == [
        ("logits", (7, 16), "bfloat16"),
        ("lse", (7,), "float32"),
    ]
