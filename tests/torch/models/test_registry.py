"""Every preset can be built, with the names, shapes and element count that the symbolic half states."""

import pytest
import torch

from plait.config.model import GptConfig, LlamaConfig
from plait.config.presets import list_presets
from plait.contract.model import derive_parameter_shapes
from plait.models import build_model

PRESETS = list_presets()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_parameters_that_its_contract_states(name):
    config = PRESETS[name].config
    model = build_model(config, device="meta", dtype=torch.bfloat16)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == derive_parameter_shapes(config)
    assert list(shapes) == list(derive_parameter_shapes(config))
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            num_layers=1,
            width=16,
            num_heads=4,
            num_kv_heads=2,
            mlp_width=12,
            vocab_size=11,
            max_seq_len=8,
            qkv_bias=True,
        ),
        GptConfig(num_layers=1, width=16, num_heads=4, vocab_size=11, max_seq_len=8),
    ],
    ids=lambda config: config.family,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_computes_in_the_dtype_it_was_built_in(config, dtype):
    model = build_model(config, dtype=dtype)
    logits = model(torch.arange(10).view(2, 5))
    assert logits.dtype == dtype
    assert logits.shape == (10, 11)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
