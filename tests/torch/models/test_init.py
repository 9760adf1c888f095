"""Initialisation: the same numbers for every cut, on the meta device too, and the stated spread."""

from math import sqrt

import pytest
import torch
from torch import nn

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.contract.model import derive_plan
from plait.models import build_model, initialize
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.shard import shard_tensor
from tests.support.lone_mesh import build_lone_mesh

LLAMA = LlamaConfig(
    num_layers=2, width=32, num_heads=8, num_kv_heads=8, mlp_width=44, vocab_size=50, max_seq_len=8, qkv_bias=True
)
GPT = GptConfig(num_layers=2, width=32, num_heads=8, vocab_size=50, max_seq_len=8)
TIED = LLAMA.model_copy(update={"tied_embeddings": True})
CONFIGS = pytest.mark.parametrize("config", [LLAMA, TIED, GPT], ids=["llama", "llama tied", "gpt tied"])


def build_initialized(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_model(config, dtype=dtype)
    initialize(model, config, seed)
    return model


@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_model_given_memory_after_the_cut_has_the_bits_of_the_cut_model(config, tp, dtype):
    """FIELD 3.14, 3.15: 8 heads, 44 mlp columns and 50 vocabulary rows over 3 ranks."""
    dense = dict(build_initialized(config, dtype=dtype).named_parameters())
    for rank in range(tp):
        model = build_model(config, device="meta", dtype=dtype)
        parallelize(model, build_lone_mesh(tp, rank), derive_plan(config))
        model.to_empty(device="cpu")
        initialize(model, config, seed=0)
        assert [name for name, _ in model.named_parameters()] == list(dense)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, shard_tensor(dense[name], ownership_of(model)[name], rank)), name


@CONFIGS
def test_initialize_is_the_same_before_and_after_the_cut(config):
    before, after = build_initialized(config), build_model(config)
    for model in (before, after):
        parallelize(model, build_lone_mesh(3, 2), derive_plan(config))
    initialize(after, config, seed=0)
    for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(one, other), name


@CONFIGS
def test_every_parameter_has_its_own_numbers_of_the_stated_spread(config):
    model = build_initialized(config)
    drawn = []
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / sqrt(4) if name.endswith(("wo.weight", "w_down.weight")) else 0.02
            # at least 256 elements each: an estimate of std is within 4 of its own deviations
            assert abs(parameter.std().item() / std - 1) < 4 / sqrt(2 * parameter.numel()), name
            drawn.append(parameter.flatten()[:32] / std)
    assert len(torch.stack(drawn).unique(dim=0)) == len(drawn)


def test_seeds_give_different_numbers():
    one, two = (build_initialized(LLAMA, seed).embedding.weight for seed in (0, 1))
    assert not (one == two).any()


@pytest.mark.parametrize("config", [TIED, GPT], ids=["llama", "gpt"])
def test_a_tied_weight_stays_one_parameter(config):
    model = build_model(config, device="meta")
    parallelize(model, build_lone_mesh(2), derive_plan(config))
    model.to_empty(device="cpu")
    initialize(model, config, seed=0)
    assert model.get_submodule("head").weight is model.get_submodule("embedding").weight
    assert "head.weight" not in dict(model.named_parameters())
