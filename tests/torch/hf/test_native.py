from pathlib import Path

import pytest
import torch

from plait.checkpoint.names import model_name
from plait.checkpoint.part import Tensors, build_owned
from plait.checkpoint.sharded import load_checkpoint, save_checkpoint
from plait.comm.mesh import build_mesh
from plait.config import GptConfig, load_preset
from plait.config.model import ModelConfig
from plait.hf.convert.origin import open_as_native
from plait.hf.convert.run import Request, convert
from plait.models.init import initialize
from plait.models.registry import build_model
from plait.sharding import MeshShape, Ownership
from tests.support.hf_models import build_hf_model

MESH = build_mesh(MeshShape())

REORDERED = 1e-12
"""Of float64 logits that are at most about 10: the same sums in another order."""

SCALING = load_preset("llama3-405b").rope_scaling  # type: ignore[union-attr]

MODELS: dict[str, ModelConfig] = {
    **{name: load_preset(name) for name in ("llama-tiny", "qwen-tiny", "smollm-tiny")},
    "llama3-scaling": load_preset("llama-tiny").model_copy(
        update={"rope_scaling": load_preset("llama3-405b").rope_scaling}
    ),  # type: ignore[union-attr]
    "gpt": GptConfig(num_layers=2, width=24, num_heads=4, mlp_width=50, vocab_size=67, max_seq_len=16),
    "gpt-untied": GptConfig(num_layers=1, width=24, num_heads=4, vocab_size=67, max_seq_len=16, tied_embeddings=False),
}


def _quiet(total: int) -> object:
    return lambda size_bytes: None


def _own(model: torch.nn.Module) -> Tensors:
    return {
        model_name(name): build_owned(Ownership(model_name(name), tuple(param.shape)), param.detach())
        for name, param in model.named_parameters()
    }


def _tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_ours_gives_the_same_logits_in_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = MODELS[name]
    model = build_model(config, dtype=torch.float64).eval()
    initialize(model, config, seed=3)
    _roughen(model)
    state = {"config": {"model": {"family": config.family, **config.model_dump(mode="json")}}}
    folder = save_checkpoint(tmp_path, 1, _own(model), state, MESH)
    convert(Request(folder, tmp_path / "hf"), _quiet)  # type: ignore[arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    tokens = _tokens(config.vocab_size)
    with torch.no_grad():
        expected, logits = model(tokens), theirs(tokens).logits.flatten(0, 1)
    # transformers computes rotary angles in float32, and norms of Llama as well.
    tolerance = REORDERED if config.family == "gpt" else 1e-4
    assert (logits - expected).abs().max() < tolerance
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_a_model_of_transformers_gives_the_same_logits_as_one_of_ours(tmp_path: Path, name: str) -> None:
    theirs = build_hf_model(name, dtype=torch.float64)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    convert(Request(tmp_path / "hf", tmp_path / "native", "native", tp=2), _quiet)  # type: ignore[arg-type]
    config = open_as_native(tmp_path / "hf").native
    assert config is not None
    model = build_model(config, dtype=torch.float64).eval()
    load_checkpoint(tmp_path / "native", _own(model), MESH)
    tokens = _tokens(config.vocab_size)
    with torch.no_grad():
        expected, logits = theirs(tokens).logits.flatten(0, 1), model(tokens)
    tolerance = REORDERED if config.family == "gpt" else 1e-4
    assert (logits - expected).abs().max() < tolerance
    assert expected.std() > 0.1


@torch.no_grad()
def _roughen(model: torch.nn.Module) -> None:
    """Norms and biases that are not ones and zeros, so that each has its place."""
    generator = torch.Generator().manual_seed(5)
    for param in model.parameters():
        param.add_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.1)
