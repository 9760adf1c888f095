"""The Llama family against its formulas, written out head by head in float64."""

from math import sqrt

import pytest
import torch
from torch import Tensor

from plait.config.model import LlamaConfig
from plait.models import build_model, initialize
from plait.models.llama import LlamaModel

B, S = 2, 6


def build_config(**changes: object) -> LlamaConfig:
    sizes = {"num_layers": 2, "width": 24, "num_heads": 6, "num_kv_heads": 2, "mlp_width": 20, "vocab_size": 17}
    return LlamaConfig(**{**sizes, "max_seq_len": 16, **changes})


def build(config: LlamaConfig, dtype: torch.dtype = torch.float64) -> LlamaModel:
    model = build_model(config, dtype=dtype)
    initialize(model, config, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norm weights of 1 and biases of 0 would hide that they are used
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
        else:
            parameter.data *= 10  # small weights would hide attention behind the residual stream
    return model


def build_tokens() -> Tensor:
    return torch.arange(B * S).view(B, S) * 5 % 17


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x_SH: Tensor, theta: float) -> Tensor:
    half = x_SH.shape[1] // 2
    angles = torch.arange(S, dtype=torch.float64)[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x_SH[:, :half], x_SH[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def attend(x_SD: Tensor, weights: dict[str, Tensor], config: LlamaConfig) -> Tensor:
    q, k, v = (x_SD @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0) for name in ("wq", "wk", "wv"))
    heads = []
    for n in range(config.num_heads):
        kv = n // (config.num_heads // config.num_kv_heads)
        own, read = (slice(head * config.head_width, (head + 1) * config.head_width) for head in (n, kv))
        scores = turn(q[:, own], config.rope_theta) @ turn(k[:, read], config.rope_theta).T / sqrt(config.head_width)
        rows = [scores[s, : s + 1].softmax(0) @ v[: s + 1, read] for s in range(S)]
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ weights["wo.weight"].T


def compute_logits(state: dict[str, Tensor], tokens_S: Tensor, config: LlamaConfig) -> Tensor:
    x = state["embedding.weight"][tokens_S]
    for layer in range(config.num_layers):
        own = {name.removeprefix(f"layers.{layer}."): value for name, value in state.items()}
        attention = {name.removeprefix("attention."): value for name, value in own.items()}
        x = x + attend(normalise(x, own["attention_norm.weight"], config.norm_eps), attention, config)
        h = normalise(x, own["mlp_norm.weight"], config.norm_eps)
        gate = h @ own["mlp.w_gate.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (h @ own["mlp.w_up.weight"].T)) @ own["mlp.w_down.weight"].T
    return normalise(x, state["norm.weight"], config.norm_eps) @ state["head.weight"].T


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 6},
        {"num_kv_heads": 1},
        {"head_width": 10},
        {"qkv_bias": True},
        {"tied_embeddings": True, "norm_eps": 0.1},
        {"rope_theta": 7.0},
    ],
    ids=str,
)
@torch.no_grad()
def test_logits_equal_the_formulas(changes):
    config = build_config(**changes)
    model, tokens = build(config), build_tokens()
    expected = torch.cat([compute_logits(model.state_dict(), row, config) for row in tokens])
    torch.testing.assert_close(model(tokens), expected)


@torch.no_grad()
def test_float32_differs_from_its_float64_twin_by_rounding_only():
    config, tokens = build_config(), build_tokens()
    twin = build(config)
    model = build_model(config)
    model.load_state_dict(twin.state_dict())
    # two layers of float32 sums over at most 24 terms; logits are of order 10
    torch.testing.assert_close(model(tokens).double(), twin(tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_no_token_sees_a_later_one_or_another_sequence():
    model, tokens = build(build_config(), torch.float32), build_tokens()
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 17
    before, after = model(tokens).view(B, S, -1), model(changed).view(B, S, -1)
    assert torch.equal(before[0, :4], after[0, :4])
    assert torch.equal(before[1], after[1])
    assert not torch.isclose(before[0, 4:], after[0, 4:]).all(-1).any()


def test_tied_head_is_the_embedding():
    model = build(build_config(tied_embeddings=True))
    assert "head.weight" not in dict(model.named_parameters())
    model(build_tokens()).sum().backward()
    assert model.head.weight.grad is model.embedding.weight.grad
