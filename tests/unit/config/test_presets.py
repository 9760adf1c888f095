import pytest

from plait.config import GptConfig, LlamaConfig, list_presets, load_preset, load_run_config
from plait.errors import ConfigError

PUBLISHED_PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-72b": 72_706_203_648,
    "smollm2-135m": 134_515_008,
    "gpt2": 124_439_808,
}
"""Elements of the published checkpoints."""

NAMED_PARAMETERS = {"gpt3-175b": 175e9, "gpt-22b": 22e9, "gpt-175b": 175e9, "gpt-530b": 530e9, "gpt-1t": 1000e9}
"""What the papers call them."""


@pytest.mark.parametrize(("name", "num_parameters"), PUBLISHED_PARAMETERS.items())
def test_preset_has_exactly_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert load_preset(name).num_parameters == num_parameters


@pytest.mark.parametrize(("name", "num_parameters"), NAMED_PARAMETERS.items())
def test_preset_has_the_size_in_its_name(name: str, num_parameters: float) -> None:
    assert load_preset(name).num_parameters == pytest.approx(num_parameters, rel=0.01)


def test_every_published_model_is_a_preset() -> None:
    small = {"llama-tiny", "llama-tiny-gqa2", "qwen-tiny", "smollm-tiny", "gpt-tiny", "llama-demo"}
    assert set(list_presets()) == {*PUBLISHED_PARAMETERS, *NAMED_PARAMETERS, *small}


@pytest.mark.parametrize("name", list_presets())
def test_preset_is_a_run_of_its_own(name: str) -> None:
    config = load_run_config(name)
    assert config.model == load_preset(name)
    assert config.seq_len == config.model.max_seq_len


@pytest.mark.parametrize("name", list_presets())
def test_preset_says_where_its_numbers_come_from(name: str) -> None:
    assert list_presets()[name].source


def test_tiny_presets_cover_what_differs_between_models() -> None:
    gqa2, qwen, smollm, gpt = map(load_preset, ("llama-tiny-gqa2", "qwen-tiny", "smollm-tiny", "gpt-tiny"))
    assert gqa2.num_kv_heads == 2
    assert isinstance(qwen, LlamaConfig)
    assert qwen.qkv_bias
    assert smollm.tied_embeddings
    assert isinstance(gpt, GptConfig)
    assert (gpt.dropout, gpt.attention_dropout) == (0.1, 0.1)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'there is no preset "gtp2"\n\nhint: did you mean "gpt2"\?'):
        load_preset("gtp2")
