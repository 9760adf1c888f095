"""The shape of a transformer: the Llama family and the GPT-2 family."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from plait.config.section import Count, Probability, Problem, Section

Layers = Annotated[int, Field(ge=1, le=10_000)]
"""Each is listed in the trace of a step."""


def _derive_head_width(fields: dict[str, Any]) -> int:
    return max(1, int(fields["width"]) // int(fields["num_heads"]))


def _derive_mlp_width(fields: dict[str, Any]) -> int:
    return 4 * int(fields["width"])


class Llama3RopeScaling(Section):
    """Stretch low frequencies of the rotary embedding to a longer context, as Llama 3.1 does."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_seq_len: Count

    def conflicts(self) -> Iterator[Problem]:
        """Between the two frequency factors the scaling is interpolated, so they must be in order and apart."""
        if self.low_freq_factor >= self.high_freq_factor:
            yield Problem("low_freq_factor", f"must be below high_freq_factor = {self.high_freq_factor}")


class LlamaConfig(Section):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases but those of `qkv_bias`."""

    family: Literal["llama"] = "llama"
    num_layers: Layers
    width: Count
    num_heads: Count
    num_kv_heads: Count
    head_width: Count = Field(default_factory=_derive_head_width)
    """`width / num_heads` unless given."""
    mlp_width: Count
    vocab_size: Count
    max_seq_len: Count
    norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    qkv_bias: bool = False
    tied_embeddings: bool = False

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, a tied one once."""
        query, kv = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        attention = 2 * self.width * query + 2 * self.width * kv + (query + 2 * kv if self.qkv_bias else 0)
        layer = attention + 3 * self.width * self.mlp_width + 2 * self.width
        tables = 1 if self.tied_embeddings else 2
        return self.num_layers * layer + self.width + tables * self.vocab_size * self.width

    def conflicts(self) -> Iterator[Problem]:
        """Heads must form KV groups and, turned pair by pair, have an even width."""
        if self.num_heads % self.num_kv_heads:
            yield Problem("num_heads", f"is not a multiple of num_kv_heads = {self.num_kv_heads}")
        yield from _list_head_width_conflicts(self)
        if self.head_width % 2:
            yield Problem("head_width", "must be even: rotary positions turn pairs of features")


class GptConfig(Section):
    """LayerNorm, learned positions, GELU (tanh form), biases everywhere but in the head, dropout."""

    family: Literal["gpt"] = "gpt"
    num_layers: Layers
    width: Count
    num_heads: Count
    mlp_width: Count = Field(default_factory=_derive_mlp_width)
    """`4 * width` unless given."""
    vocab_size: Count
    max_seq_len: Count
    norm_eps: PositiveFloat = 1e-5
    dropout: Probability = 0.0
    """On the embeddings and on what each residual branch adds."""
    attention_dropout: Probability = 0.0
    """On the attention probabilities."""
    tied_embeddings: bool = True

    @property
    def num_kv_heads(self) -> int:
        """Every query head has its own key and value head."""
        return self.num_heads

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, a tied one once."""
        attention = 4 * self.width * self.width + 4 * self.width
        mlp = 2 * self.width * self.mlp_width + self.mlp_width + self.width
        layer = attention + mlp + 4 * self.width
        tables = 1 if self.tied_embeddings else 2
        ends = (tables * self.vocab_size + self.max_seq_len + 2) * self.width
        return self.num_layers * layer + ends

    def conflicts(self) -> Iterator[Problem]:
        """Heads must share the width out."""
        yield from _list_head_width_conflicts(self)


ModelConfig = Annotated[LlamaConfig | GptConfig, Field(discriminator="family")]

FAMILIES: dict[str, type[LlamaConfig] | type[GptConfig]] = {"llama": LlamaConfig, "gpt": GptConfig}


def _list_head_width_conflicts(model: LlamaConfig | GptConfig) -> Iterator[Problem]:
    is_derived = "head_width" not in model.model_fields_set
    if is_derived and model.width % model.num_heads:
        yield Problem("width", f"is not a multiple of num_heads = {model.num_heads}")
