from math import prod

import pytest
from pydantic import ValidationError

from plait.config import GptConfig, Llama3RopeScaling, LlamaConfig, list_presets

LLAMA = {"num_layers": 2, "width": 64, "num_heads": 8, "num_kv_heads": 4, "mlp_width": 96}
ENDS = {"vocab_size": 256, "max_seq_len": 64}


def build_llama(**changes: object) -> LlamaConfig:
    return LlamaConfig.model_validate({**LLAMA, **ENDS, **changes})


def build_gpt(**changes: object) -> GptConfig:
    return GptConfig.model_validate({"num_layers": 2, "width": 64, "num_heads": 8, **ENDS, **changes})


def list_llama_shapes(model: LlamaConfig) -> list[tuple[int, ...]]:
    """Every parameter, as the model's modules hold them."""
    query, kv = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    attention = [(query, model.width), (kv, model.width), (kv, model.width), (model.width, query)]
    biases = [(query,), (kv,), (kv,)] if model.qkv_bias else []
    mlp = [(model.mlp_width, model.width), (model.mlp_width, model.width), (model.width, model.mlp_width)]
    layer = [*attention, *biases, *mlp, (model.width,), (model.width,)]
    tables = [(model.vocab_size, model.width)] * (1 if model.tied_embeddings else 2)
    return [*tables, *layer * model.num_layers, (model.width,)]


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"tied_embeddings": True}, {"head_width": 10}], ids=str)
def test_llama_counts_every_parameter_once(changes: dict[str, object]) -> None:
    model = build_llama(**changes)
    assert model.num_parameters == sum(map(prod, list_llama_shapes(model)))


def test_gpt_head_that_is_not_tied_is_one_more_table() -> None:
    assert build_gpt(tied_embeddings=False).num_parameters - build_gpt().num_parameters == 256 * 64


def test_widths_are_derived_unless_given() -> None:
    assert build_llama().head_width == 8
    assert build_llama(head_width=16).head_width == 16
    assert build_gpt().mlp_width == 256
    assert build_gpt(mlp_width=100).mlp_width == 100
    assert build_gpt().num_kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads: is not a multiple of num_kv_heads = 3"),
        ({"width": 65}, "width: is not a multiple of num_heads = 8"),
        ({"head_width": 7}, "head_width: must be even"),
        ({"num_layers": 0}, "greater than or equal to 1"),
        ({"num_layers": 2.5}, "valid integer"),
        ({"num_layers": True}, "valid integer"),
        ({"norm_eps": float("nan")}, "finite number"),
        ({"dropout": 0.1}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_llama_that_cannot_exist_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_llama(**changes)


def test_every_conflict_of_a_model_is_named_at_once() -> None:
    with pytest.raises(ValidationError, match=r"num_kv_heads = 3; width: .* num_heads = 8; head_width: must be even"):
        build_llama(num_kv_heads=3, width=60)


def test_gpt_heads_must_share_the_width() -> None:
    with pytest.raises(ValidationError, match="width: is not a multiple of num_heads = 8"):
        build_gpt(width=65)


def test_rope_scaling_needs_two_different_frequencies() -> None:
    with pytest.raises(ValidationError, match=r"low_freq_factor: must be below high_freq_factor = 1\.0"):
        Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=64)


def test_models_are_frozen_and_hashable() -> None:
    model = build_llama()
    with pytest.raises(ValidationError, match="frozen"):
        model.width = 128
    assert len({model, build_llama(), *(preset.config for preset in list_presets().values())}) == len(list_presets())
