import json
from pathlib import Path

import pytest

from plait.config import LlamaConfig, load_preset
from plait.config.hf.read import load_hf_fields
from plait.config.hf.write import build_hf_config

NAMES = ["llama-tiny", "llama2-7b", "llama3-405b", "qwen2.5-72b", "qwen-tiny", "smollm2-135m", "gpt2", "gpt3-175b"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_as_the_same_model(tmp_path: Path, name: str) -> None:
    model = load_preset(name)
    (tmp_path / "config.json").write_text(json.dumps(build_hf_config(model, dtype="float32")))
    fields = load_hf_fields(tmp_path)
    assert type(model).model_validate(fields) == model


def test_heads_whose_widths_do_not_add_up_to_the_width_of_the_model_are_kept(tmp_path: Path) -> None:
    model = load_preset("llama-tiny").model_copy(update={"head_width": 20})
    (tmp_path / "config.json").write_text(json.dumps(build_hf_config(model, dtype="float32")))
    assert LlamaConfig.model_validate(load_hf_fields(tmp_path)) == model


def test_special_tokens_are_those_of_the_tokenizer_and_not_the_defaults_of_the_architecture() -> None:
    config = build_hf_config(load_preset("llama-tiny"), dtype="bfloat16", end_of_text=7)
    assert (config["eos_token_id"], config["bos_token_id"], config["dtype"]) == (7, None, "bfloat16")
