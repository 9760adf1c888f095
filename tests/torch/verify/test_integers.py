"""The integer regions: all that is parallel and linear, on numbers that are exact and say something."""

import pytest
import torch
from torch import nn

from plait.config.load import load_run_config
from plait.contract.plan import Column, Row, VocabEmbedding, VocabHead
from plait.models.registry import build_model
from plait.verify.runtime.integers import Region, list_regions, run_regions
from plait.verify.runtime.workload import build_batch

EXACT_IN_FLOAT32 = 2**24


def load(source):
    return load_run_config(source, ["train.seq_len=8", "train.micro_batch_size=2"])


def run(config, dtype=torch.float32):
    model = build_model(config.model, dtype=dtype)
    return {
        piece.ownership.name: piece.tensor for piece in run_regions(model, config, build_batch(config).tokens.flatten())
    }


def test_regions_of_a_llama_are_its_gather_groups_rows_and_ends():
    attention, mlp = "layers.0.attention", "layers.0.mlp"
    assert set(list_regions(load("llama-tiny"))) == {
        Region(Column, (f"{attention}.wq", f"{attention}.wk", f"{attention}.wv")),
        Region(Row, (f"{attention}.wo",)),
        Region(Column, (f"{mlp}.w_gate", f"{mlp}.w_up")),
        Region(Row, (f"{mlp}.w_down",)),
        Region(VocabEmbedding, ("embedding",)),
        Region(VocabHead, ("head",)),
    }


@pytest.mark.parametrize("source", ["llama-tiny", "qwen-tiny", "smollm-tiny", "gpt-tiny"])
def test_regions_cover_every_linear_and_embedding_of_a_block_and_both_ends(source):
    config = load(source)
    members = {member for region in list_regions(config) for member in region.members}
    linear = {
        name
        for name, module in build_model(config.model).named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and not name.startswith("layers.1.")
    }
    assert members == linear - {"position_embedding"}


@pytest.mark.parametrize("source", ["qwen-tiny", "gpt-tiny"])
def test_every_result_is_integers_that_differ_and_that_float32_holds_exactly(source):
    config = load(source)
    exact = run(config, torch.float64)
    for name, value in run(config).items():
        assert torch.equal(value.double(), exact[name]), name
        assert torch.equal(value, value.round()), name
        assert value.abs().max() < EXACT_IN_FLOAT32, name
        assert len(value.unique()) > 3, name


def test_results_are_outputs_input_gradients_and_the_gradient_of_every_parameter():
    names = set(run(load("gpt-tiny")))
    assert {"y of head", "grad of x of head", "y of embedding", "y of layers.0.mlp.w_down"} <= names
    assert "grad of layers.0.mlp.w_down.bias in layers.0.mlp.w_down" in names
    assert "grad of layers.0.attention.wv.bias in layers.0.attention.wq" in names
    assert {"grad of embedding.weight in embedding", "grad of embedding.weight in head"} <= names, "a tied weight twice"


def test_regions_are_those_of_the_first_block_that_is_quantized():
    overrides = [
        "train.seq_len=32",
        "model.num_layers=4",
        "quantization=fp8_currentscaling",
        "quantization.keep_first=2",
    ]
    members = {member for region in list_regions(load_run_config("llama-tiny", overrides)) for member in region.members}
    assert "layers.2.mlp.w_up" in members
    assert {name.split(".")[1] for name in members if "." in name} == {"2"}
