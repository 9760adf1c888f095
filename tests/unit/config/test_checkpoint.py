import json
from pathlib import Path
from typing import Any

import pytest

from plait.config import FineTuneConfig, RunConfig, load_run_config, load_training_config
from plait.errors import ConfigError

LLAMA = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 67, "max_position_embeddings": 32,
}  # fmt: skip

RUN = """
[model]
path = "{model}"
[data]
kind = "text"
paths = "corpus.txt"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_config(tmp_path / "model", LLAMA)


@pytest.fixture
def run_file(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(model=model))
    return file


def save_config(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def read_error(source: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_training_config(str(source), overrides)
    return str(caught.value)


def test_everything_but_the_path_is_read_from_the_config_of_the_directory(run_file: Path, model: Path) -> None:
    run = load_training_config(str(run_file))
    assert isinstance(run, FineTuneConfig)
    assert run.model.model_dump() == {
        "family": "hf", "path": str(model), "model_type": "llama", "num_layers": 2, "width": 24, "num_heads": 6,
        "num_kv_heads": 3, "head_width": 4, "mlp_width": 40, "vocab_size": 67, "max_seq_len": 32,
        "lora": None,
    }  # fmt: skip
    assert run.seq_len == 32


def test_the_names_of_gpt2_are_known(tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 6, "n_positions": 16}
    folder = save_config(tmp_path / "gpt2", {**fields, "n_inner": None, "attn_pdrop": 0.0, "vocab_size": 67})
    run = load_training_config("llama-tiny", [f"model.path={folder}"])
    assert (run.model.width, run.model.num_kv_heads, run.model.head_width, run.seq_len) == (24, 6, 4, 16)


def test_text_is_turned_into_tokens_by_the_tokenizer_of_the_directory(run_file: Path, model: Path) -> None:
    run = load_training_config(str(run_file))
    assert run.data is not None
    assert run.data.tokenizer == str(model / "tokenizer.json")
    other = load_training_config(str(run_file), ["data.tokenizer=other.json"])
    assert other.data is not None
    assert other.data.tokenizer == "other.json"
    tokens = load_training_config(str(run_file), ["data.kind=tokens"])
    assert tokens.data is not None
    assert tokens.data.tokenizer is None


def test_an_override_of_the_path_replaces_the_whole_model(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "native.toml"
    file.write_text('[model]\npreset = "llama-tiny"\nvocab_size = 300\n')
    assert isinstance(load_training_config(str(file)), RunConfig)
    run = load_training_config(str(file), [f"model.path={model}"])
    assert isinstance(run, FineTuneConfig)
    assert run.model.vocab_size == 67


def test_an_override_of_the_preset_replaces_the_directory(run_file: Path) -> None:
    run = load_training_config(str(run_file), ["model.preset=llama-tiny", "data.tokenizer=t.json"])
    assert isinstance(run, RunConfig)


def test_degrees_and_lengths_that_cannot_be_are_found_before_anything_starts(run_file: Path) -> None:
    message = read_error(run_file, "parallel.tp=7", "train.seq_len=64")
    assert "parallel.tp = 7 (command line): layers.*.attention.wq [N*H, D]: 6 query heads in 3 KV groups" in message
    assert "train.seq_len = 64 (command line): is more than model.max_seq_len = 32" in message


def test_other_commands_say_that_they_do_not_take_a_directory(run_file: Path, model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(str(run_file))
    assert str(caught.value) == (
        f'{run_file}: model.path = "{model}": only `plait train` and `plait verify` take a Hugging Face directory\n\n'
        "hint: model.preset=DIR takes the shape of a Hugging Face model, without its weights"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=nowhere"], 'model.path = "nowhere" (command line): there is no such directory'),
        (["model.path=3"], "model.path = 3 (command line): should be a string"),
        (["model.path=."], 'model.path = "." (command line): has no config.json'),
        (
            ["model.path=nowhere", "model.vocab_size=3"],
            "model.vocab_size = 3 (command line): cannot be given beside model.path, whose config.json says it",
        ),
        (["model.path=nowhere", "train.setps=1"], "train.setps = 1 (command line): unknown key"),
    ],
)
def test_what_cannot_be_is_said(run_file: Path, overrides: list[str], message: str) -> None:
    assert message in read_error(run_file, *overrides)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "its config.json (model_type = llama) has no vocab_size"),
        (
            {"max_position_embeddings": None},
            "its config.json (model_type = llama) has no max_position_embeddings or n_positions",
        ),
        ({"hidden_size": "many"}, "its config.json has hidden_size = 'many'"),
        ({"num_attention_heads": 0}, "its config.json has num_attention_heads = 0"),
        (
            {"attn_pdrop": 0.1, "resid_pdrop": 0.1},
            "its config has attn_pdrop = 0.1, a dropout whose masks would differ from run to run\n\n"
            "hint: set attn_pdrop to 0 in its config.json; other dropouts may stay",
        ),
        ({"model_type": "gpt2"}, "its config has attn_pdrop = 0.1, a dropout"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(
    run_file: Path, model: Path, fields: dict[str, Any], message: str
) -> None:
    save_config(model, {**LLAMA, **fields})
    assert message in read_error(run_file)


def test_a_config_that_is_no_json_is_refused(run_file: Path, model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "not valid JSON" in read_error(run_file)


def test_adapters_may_be_trained_instead_of_the_weights(run_file: Path) -> None:
    run = load_training_config(str(run_file), ["model.lora.rank=4"])
    assert isinstance(run, FineTuneConfig)
    assert run.model.lora is not None
    assert run.model.lora.model_dump() == {
        "rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": None, "path": None
    }  # fmt: skip
    overrides = ["model.lora.rank=4", "model.lora.alpha=3.5", 'model.lora.target_modules=["q_proj"]']
    run = load_training_config(str(run_file), overrides)
    assert isinstance(run, FineTuneConfig)
    assert run.model.lora is not None
    assert (run.model.lora.alpha, run.model.lora.target_modules) == (3.5, ["q_proj"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.rank=0"], "model.lora.rank = 0 (command line): should be greater than or equal to 1"),
        (["model.lora.alpha=16.0"], "model.lora.rank: is required"),
        (["model.lora.rank=2", "model.lora.dropout=1.0"], "model.lora.dropout = 1.0 (command line)"),
        (["model.lora.rank=2", "model.lora.ranks=2"], "model.lora.ranks = 2 (command line): unknown key"),
        (["model.lora=8"], "model.lora = 8 (command line): should be a table"),
        (['model.lora.path="nowhere"'], "has no adapter_config.json"),
    ],
)
def test_what_is_wrong_with_adapters_is_said_with_its_key(run_file: Path, overrides: list[str], message: str) -> None:
    assert message in read_error(run_file, *overrides)


ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["b", "a"],
}


def save_adapter_config(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | fields))
    return folder


def test_adapters_of_peft_are_trained_further_as_their_config_says(run_file: Path, tmp_path: Path) -> None:
    folder = save_adapter_config(tmp_path / "adapter")
    run = load_training_config(str(run_file), [f"model.lora.path={folder}"])
    assert isinstance(run, FineTuneConfig)
    assert run.model.lora is not None
    assert run.model.lora.model_dump() == {
        "rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["a", "b"], "path": str(folder)
    }  # fmt: skip
    assert "model.lora.rank = 8 (command line): cannot be given beside" in read_error(
        run_file, f"model.lora.path={folder}", "model.lora.rank=8"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "has use_dora = True"),
        ({"peft_type": "IA3"}, "has peft_type = 'IA3'"),
        ({"bias": "all"}, "has bias = 'all'"),
        ({"target_modules": "all-linear"}, "has target_modules = 'all-linear'"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    run_file: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = save_adapter_config(tmp_path / "adapter", **fields)
    assert message in read_error(run_file, f"model.lora.path={folder}")
