"""What of a Hugging Face model cannot be cut over context ranks is said by name, without any rank."""

from typing import Any

import pytest

from plait.errors import ConfigError
from plait.hf.context.check import check_attention
from plait.hf.context.core import describe_mask, find_window
from plait.hf.plan import plan_for
from tests.support.architectures import ARCHITECTURES, build_skeleton

CAPPED = ("gemma2", "vaultgemma")

DYNAMIC = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
LONG = {
    "rope_theta": 1e4,
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.0],
    "long_factor": [2.0, 2.0],
}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "softcapping": ("gemma2", {}, "attn_logit_softcapping = 50.0: squashes scores"),
    "dropout": ("llama", {"attention_dropout": 0.1}, r"layers.\*.self_attn: attention_dropout = 0.1: probabilities"),
    "dropout of GPT-2": ("gpt2", {"attn_pdrop": 0.1}, r"h.\*.attn: attn_dropout = 0.1: probabilities"),
    "both directions": ("gemma3_text", {"use_bidirectional_attention": True}, "its tokens see those behind them"),
    "angles by length": ("llama", {"rope_parameters": DYNAMIC}, "rope_type = .dynamic."),
    "long angles": ("llama", {"rope_parameters": LONG}, "rope_type = .longrope."),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_is_named(case):
    name, config, message = CASES[case]
    model = build_skeleton(name, **config)
    with pytest.raises(ConfigError, match=message) as caught:
        check_attention(model, plan_for(model), 2)
    assert "over 2 context ranks" in str(caught.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_that_is_compared_is_cut_or_refused(name):
    model = build_skeleton(name, attention_dropout=0.0, attn_pdrop=0.0)
    if name not in CAPPED:
        check_attention(model, plan_for(model), 2)
        return
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        check_attention(model, plan_for(model), 2)


def test_attention_that_goes_another_way_is_refused(monkeypatch):
    model = build_skeleton("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(ConfigError, match="does not go through transformers' attention interface"):
        check_attention(model, plan_for(model), 2)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"attention_mask": object()}, "padded"),
        ({"use_vmap": True}, "changed"),
        ({"allow_is_bidirectional_skip": True}, "ahead"),
    ],
)
def test_masks_that_are_not_causal_are_refused(given, what):
    assert describe_mask(local_size=4).window == 4
    with pytest.raises(ConfigError, match=what):
        describe_mask(**given)


@pytest.mark.parametrize(
    ("name", "windows"), [("llama", {None}), ("mistral", {5}), ("gemma3_text", {None, 5}), ("exaone4", {None, 5})]
)
def test_each_layer_has_its_own_window(name, windows):
    model = build_skeleton(name, layer_types=["sliding_attention", "full_attention"])
    found = [find_window(model.get_submodule(path), model.config) for path in plan_for(model).heads]
    assert len(found) == 2
    assert set(found) == windows
