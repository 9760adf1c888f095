"""What `plan_for` says of models, and what it refuses; nothing here is parallel."""

from typing import Any

import pytest
import torch
from torch import nn

from plait.contract.plan import Column, FeatureNorm, InRegion, Row, TokenLocal, VocabEmbedding, VocabHead, Whole
from plait.errors import ConfigError
from plait.hf.finding import GROUP
from plait.hf.parallelize import parallelize
from plait.hf.plan import plan_for
from plait.sharding import Columns, KeyValueHeads, QueryHeads
from tests.support.architectures import ARCHITECTURES, build_skeleton
from tests.support.lone_mesh import build_lone_mesh

LLAMA = """\
module                      role             cut in      by
model.embed_tokens          vocab_embedding  vocabulary  embedding_rowwise
model.layers.*
  > self_attn.q_proj        column           6 heads     colwise
  > self_attn.k_proj        column           3 KV heads  colwise
  > self_attn.v_proj        column           3 KV heads  colwise
  > self_attn.o_proj        row              6 heads     rowwise
  > mlp.gate_proj           column           columns     colwise
  > mlp.up_proj             column           columns     colwise
  > mlp.down_proj           row              columns     rowwise
  input_layernorm           token_local      whole       norm: own tokens
  post_attention_layernorm  token_local      whole       norm: own tokens
model.norm                  token_local      whole       norm: own tokens
lm_head                     vocab_head       vocabulary  colwise_gather_output"""


def test_a_plan_prints_as_a_table():
    assert str(plan_for(build_skeleton("llama"))) == LLAMA


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_table_is_80_columns_wide(name):
    assert max(map(len, str(plan_for(build_skeleton(name))).splitlines())) <= 80


def test_roles_of_heads_norms_and_ends():
    plan = plan_for(build_skeleton("qwen3"))
    assert plan.regions == ("model.layers.*.self_attn", "model.layers.*.mlp")
    roles = plan.roles
    assert roles["model.embed_tokens"] == VocabEmbedding()
    assert roles["lm_head"] == VocabHead()
    assert roles["model.layers.*.self_attn.q_proj"] == Column(QueryHeads(6, 3, 4), GROUP)
    assert roles["model.layers.*.self_attn.k_proj"] == Column(KeyValueHeads(6, 3, 4), GROUP)
    assert roles["model.layers.*.self_attn.o_proj"] == Row(QueryHeads(6, 3, 4))
    assert roles["model.layers.*.self_attn.q_norm"] == InRegion()
    assert roles["model.layers.*.mlp.down_proj"] == Row(Columns())
    assert roles["model.norm"] == TokenLocal()
    assert plan.replicated["model.layers.*.self_attn.q_norm"] == "own heads"


def test_packed_linears_are_parts():
    roles = plan_for(build_skeleton("phi3")).roles
    assert roles["model.layers.*.self_attn.qkv_proj.k"] == Column(KeyValueHeads(6, 3, 4), GROUP)
    assert roles["model.layers.*.mlp.gate_up_proj.up"] == Column(Columns(), GROUP)
    assert "model.layers.*.self_attn.qkv_proj" not in roles


def test_a_norm_of_all_heads_is_cut_with_them():
    roles = plan_for(build_skeleton("olmo2")).roles
    assert roles["model.layers.*.self_attn.q_norm"] == FeatureNorm(QueryHeads(6, 3, 4))
    assert roles["model.layers.*.self_attn.k_norm"] == FeatureNorm(KeyValueHeads(6, 3, 4))


def test_positions_of_gpt2_stay_whole_and_say_so():
    plan = plan_for(build_skeleton("gpt2"))
    assert plan.roles["transformer.wpe"] == Whole()
    assert plan.replicated["transformer.wpe"] == "before the layers"


def _refused(model: Any, match: str, **kwargs: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        plan_for(model, **kwargs)


def test_a_rule_that_matches_nothing_is_an_error_unless_allowed():
    model = build_skeleton("llama")
    model._tp_plan["model.layers.*.self_attn.qq_proj"] = "colwise"
    _refused(model, "rule 'colwise' of model.layers.*.self_attn.qq_proj matches no module of this model")
    plan_for(model, allow=["model.layers.*.self_attn.qq_proj"])


def test_a_rule_without_a_twin_is_named_with_its_module():
    model = build_skeleton("llama")
    model._tp_plan["model.layers.*.mlp.up_proj"] = "mla_kv_a_proj"
    _refused(model, r"rule 'mla_kv_a_proj' of model.layers.\*.mlp.up_proj \(Linear\) has no parallel twin")


def test_a_large_module_that_no_rule_covers_is_an_error_unless_allowed():
    model = build_skeleton("llama")
    with torch.device("meta"):
        for layer in model.model.layers:
            layer.adapter = nn.Linear(24, 24)
            layer.mlp.extra = nn.Linear(24, 24)
    _refused(model, r"layers\.\*\.mlp\.extra \(Linear: weight, bias\) is not covered: no rule says how to cut it")
    _refused(model, r"layers\.\*\.adapter \(Linear: weight, bias\) is not covered", allow=["model.layers.*.mlp.extra"])
    plan = plan_for(model, allow=["model.layers.*.mlp.extra", "model.layers.*.adapter"])
    assert plan.roles["model.layers.*.mlp.extra"] == InRegion()
    assert plan.roles["model.layers.*.adapter"] == TokenLocal()
    assert plan.replicated["model.layers.*.adapter"] == "allowed by the caller"


def test_parameters_of_a_layer_itself_are_refused():
    model = build_skeleton("llama")
    model.model.layers[1].scale = nn.Parameter(torch.ones(1, device="meta"))
    _refused(model, r"layers\.\* \(LlamaDecoderLayer\) has parameters of its own \(scale\)")


def test_a_norm_across_cut_heads_is_refused():
    model = build_skeleton("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight = nn.Parameter(torch.ones(24, device="meta"))
    _refused(model, r"self_attn.q_norm \(Qwen3RMSNorm \[24\]\) normalises across heads that are cut")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("bloom", "BloomForCausalLM has no tensor-parallel plan"),
        ("mixtral", r"rule 'moe_tp_experts' of model.layers.\*.mlp.experts \(MixtralExperts\): mixtures of experts"),
        ("codegen", r"h\.\* ?.*CodeGenAttention\) interleaves its heads"),
    ],
)
def test_an_architecture_that_cannot_be_cut_says_why(name, match):
    _refused(build_skeleton(name), match)


def test_what_is_no_causal_language_model_is_refused():
    _refused(nn.Linear(2, 2), "Linear is no model of transformers, so its plan is unknown")
    _refused(build_skeleton("llama").model, "LlamaModel is no causal language model")


def test_a_degree_that_cannot_be_realised_leaves_the_model_as_it_was():
    model = build_skeleton("phi3")
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ConfigError, match=r"layers\.\*\.self_attn: 6 query heads in 3 KV groups of 2 cannot be cut"):
        parallelize(model, build_lone_mesh(7))
    assert [name for name, _ in model.named_parameters()] == names


def test_a_lone_rank_keeps_packed_linears():
    model = build_skeleton("gpt2")
    names = [name for name, _ in model.named_parameters()]
    parallelize(model, build_lone_mesh(1))
    assert [name for name, _ in model.named_parameters()] == names
