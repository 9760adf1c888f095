import json
from pathlib import Path

import pytest

from plait.config import GptConfig, Llama3RopeScaling, LlamaConfig, load_preset, load_run_config
from plait.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50_257,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def load(folder: Path, source: dict[str, object]) -> LlamaConfig | GptConfig:
    (folder / "config.json").write_text(json.dumps(source))
    return load_run_config(str(folder)).model


def test_published_configs_are_the_presets(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA) == load_preset("llama3-8b")
    assert load(tmp_path, GPT2) == load_preset("gpt2")


def test_file_folder_and_model_preset_are_three_ways_to_say_the_same(tmp_path: Path) -> None:
    model = load(tmp_path, LLAMA)
    run = tmp_path / "run.toml"
    run.write_text(f'[model]\npreset = "{tmp_path}"\nnum_layers = 2\n')
    assert load_run_config(str(tmp_path / "config.json")).model == model
    assert load_run_config(str(run)).model == model.model_copy(update={"num_layers": 2})


def test_smollm_is_a_tied_llama(tmp_path: Path) -> None:
    smollm = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    more = {"num_hidden_layers": 30, "rope_theta": 100_000, "tie_word_embeddings": True, "vocab_size": 49_152}
    assert load(tmp_path, LLAMA | smollm | more) == load_preset("smollm2-135m")


def test_qwen2_has_biases_and_no_sliding_window(tmp_path: Path) -> None:
    qwen = LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}
    model = load(tmp_path, qwen)
    assert isinstance(model, LlamaConfig)
    assert (model.qkv_bias, model.max_seq_len) == (True, 8192)


def test_mistral_window_is_kept_as_a_shorter_sequence(tmp_path: Path) -> None:
    mistral = LLAMA | {"model_type": "mistral", "head_dim": 64}
    assert load(tmp_path, mistral | {"sliding_window": 4096}).max_seq_len == 4096
    assert load(tmp_path, mistral | {"sliding_window": None}).max_seq_len == 8192
    assert load(tmp_path, mistral).head_width == 64


@pytest.mark.parametrize(
    "source",
    [
        LLAMA | {"rope_scaling": SCALING},
        {key: value for key, value in LLAMA.items() if key != "rope_theta"}
        | {"rope_parameters": SCALING | {"rope_theta": 500_000.0}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_llama3_rope_scaling_is_read_from_either_form(tmp_path: Path, source: dict[str, object]) -> None:
    model = load(tmp_path, source)
    assert isinstance(model, LlamaConfig)
    assert model.rope_theta == 500_000.0
    assert model.rope_scaling == Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
    )


def test_llama_without_kv_heads_has_one_for_every_query_head(tmp_path: Path) -> None:
    assert load(tmp_path, {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 32


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"model_type": "mixtral"},
            r'config\.json: model_type = "mixtral" is not supported\n\nhint: did you mean "mistral"',
        ),
        ({}, r"model_type = null is not supported\n\nhint: known are gpt2, llama, mistral, qwen2"),
        (LLAMA | {"hidden_act": "gelu"}, r'hidden_act = "gelu": only "silu" is supported'),
        (LLAMA | {"attention_bias": True}, r"attention_bias = true: only false is supported"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, r'rope_type = "yarn": only "llama3" and "default" are supported'),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, r"factor is required for model_type = llama"),
        (LLAMA | {"rope_scaling": "yes"}, r'rope_scaling = "yes": should be an object'),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True}, r"use_sliding_window = true: only false"),
        (GPT2 | {"embd_pdrop": 0.2}, r"embd_pdrop = 0\.2: only 0\.1 is supported"),
        ({"model_type": "gpt2"}, r"n_layer is required for model_type = gpt2"),
        (LLAMA | {"hidden_size": "big"}, r'model\.width = "big": should be a valid integer'),
        (LLAMA | {"num_attention_heads": 30}, r"model\.num_heads = 30: is not a multiple of num_kv_heads = 8"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_our_models_do_not_compute_is_refused(tmp_path: Path, source: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, source)


def test_every_unsupported_feature_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 problems\n  - hidden_act = .*\n  - mlp_bias = true"):
        load(tmp_path, LLAMA | {"hidden_act": "gelu", "mlp_bias": True})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON: .*line 1"),
        ("[1]", "is a JSON object, this is a list"),
        ("[" * 100_000, "not valid JSON: .*recursion"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON: .*5000 digits"),
    ],
    ids=["syntax", "list", "deep", "long"],
)
def test_file_that_is_no_config_says_so(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_run_config(str(file))


def test_no_kv_heads_at_all_is_a_mistake_and_not_the_number_of_query_heads(tmp_path: Path) -> None:
    assert load(tmp_path, {**LLAMA, "num_key_value_heads": None}).num_kv_heads == 32
    with pytest.raises(ConfigError, match="num_kv_heads = 0: should be greater than or equal to 1"):
        load(tmp_path, {**LLAMA, "num_key_value_heads": 0})
