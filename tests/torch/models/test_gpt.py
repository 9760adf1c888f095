"""The GPT-2 family against its formulas, written out head by head in float64, and its dropout."""

from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from plait.config.model import GptConfig
from plait.errors import ConfigError
from plait.models import build_model, initialize
from plait.models.gpt import GptModel
from plait.parallel.context.core import compute_attention_probabilities
from plait.parallel.dropout import seed_dropout, set_dropout_offset

B, S = 2, 6


def build_config(**changes: object) -> GptConfig:
    sizes = {"num_layers": 2, "width": 24, "num_heads": 3, "vocab_size": 17, "max_seq_len": 8}
    return GptConfig(**{**sizes, **changes})


def build(config: GptConfig, dtype: torch.dtype = torch.float64) -> GptModel:
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


class Formulas:
    """The model as functions of its state dict, for one sequence."""

    def __init__(self, state: dict[str, Tensor], config: GptConfig) -> None:
        self.state, self.config = state, config

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def normalise(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        return scaled * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def attend(self, x_SD: Tensor, name: str) -> Tensor:
        q, k, v = (self.linear(x_SD, f"{name}.{part}").split(self.config.head_width, -1) for part in ("wq", "wk", "wv"))
        heads = []
        for n in range(self.config.num_heads):
            scores = q[n] @ k[n].T / sqrt(self.config.head_width)
            heads.append(torch.stack([scores[s, : s + 1].softmax(0) @ v[n][: s + 1] for s in range(S)]))
        return self.linear(torch.cat(heads, dim=-1), f"{name}.wo")

    def compute_logits(self, tokens_S: Tensor) -> Tensor:
        x = self.state["embedding.weight"][tokens_S] + self.state["position_embedding.weight"][:S]
        for layer in range(self.config.num_layers):
            block = f"layers.{layer}"
            x = x + self.attend(self.normalise(x, f"{block}.attention_norm"), f"{block}.attention")
            up = self.linear(self.normalise(x, f"{block}.mlp_norm"), f"{block}.mlp.w_up")
            gelu = up / 2 * (1 + torch.tanh(sqrt(2 / pi) * (up + 0.044715 * up**3)))
            x = x + self.linear(gelu, f"{block}.mlp.w_down")
        return self.normalise(x, "norm") @ self.state["head.weight"].T


@pytest.mark.parametrize("changes", [{}, {"mlp_width": 20}, {"tied_embeddings": False, "norm_eps": 0.1}], ids=str)
@torch.no_grad()
def test_logits_equal_the_formulas(changes):
    config = build_config(**changes)
    model, tokens = build(config), build_tokens()
    formulas = Formulas(model.state_dict(), config)
    torch.testing.assert_close(model(tokens), torch.cat([formulas.compute_logits(row) for row in tokens]))


@torch.no_grad()
def test_no_token_sees_a_later_one_or_another_sequence():
    config = build_config(dropout=0.1, attention_dropout=0.1)
    model, tokens = build(config, torch.float32), build_tokens()
    seed_dropout(model, 0)
    set_dropout_offset(model, 0)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 17
    for mode in (True, False):
        model.train(mode)
        before, after = model(tokens).view(B, S, -1), model(changed).view(B, S, -1)
        assert torch.equal(before[0, :4], after[0, :4])
        assert torch.equal(before[1], after[1])
        assert not torch.isclose(before[0, 4:], after[0, 4:]).all(-1).any()


@torch.no_grad()
def test_explicit_attention_equals_the_fused_one_when_nothing_is_dropped():
    config = build_config(attention_dropout=1e-12)
    model, tokens = build(config), build_tokens()
    seed_dropout(model, 0)
    set_dropout_offset(model, 0)
    assert model.layers[0].attention.dropout.is_active
    torch.testing.assert_close(model(tokens), model.eval()(tokens))


def test_half_probabilities_are_normalised_in_float32():
    """In bfloat16 a running sum of 700 equal terms would stop growing at 256."""
    q = k = torch.zeros(1, 1, 700, 4, dtype=torch.bfloat16)
    expected = 1 / torch.arange(1, 701).float()
    assert torch.equal(compute_attention_probabilities(q, k)[0, 0, :, 0], expected.bfloat16())


@torch.no_grad()
def test_each_dropout_of_the_model_acts():
    tokens = build_tokens()
    outputs = []
    model = build(build_config(dropout=0.5, attention_dropout=0.5))
    seed_dropout(model, 0)
    set_dropout_offset(model, 0)
    names = ["embedding_dropout", "layers.1.attention.dropout", "layers.1.attention_dropout", "layers.1.mlp_dropout"]
    for name in names:
        model.eval().get_submodule(name).train()
        outputs.append(model(tokens))
    outputs.append(model.eval()(tokens))
    assert not any(torch.isclose(one, two).all() for i, one in enumerate(outputs) for two in outputs[:i])


def test_recomputation_draws_the_same_masks():
    """Activation checkpointing runs a forward twice; a mask drawn from a generator would need its state restored."""
    model, tokens = build(build_config(dropout=0.2, attention_dropout=0.2)), build_tokens()
    seed_dropout(model, 0)
    set_dropout_offset(model, 0)
    assert torch.equal(model(tokens), model(tokens))


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ConfigError, match="a sequence of 9 tokens has no position embedding beyond 8"):
        build(build_config())(torch.zeros(1, 9, dtype=torch.int64))
