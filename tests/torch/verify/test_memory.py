"""A model that does not fit is refused before any rank is started, with a size that does fit."""

import pytest

from plait.config.load import load_run_config
from plait.errors import ConfigError
from plait.verify.runtime import memory


def load(source, *overrides):
    return load_run_config(source, ["train.seq_len=32", *overrides])


def test_tiny_models_fit():
    memory.check_memory(load("llama-tiny"))


def test_huge_model_is_refused_and_the_hint_names_a_number_of_layers_that_fits(monkeypatch):
    monkeypatch.setattr(memory, "_available_bytes", lambda: 400 * 10**9)
    with pytest.raises(ConfigError, match=r"70,553,706,496 parameters.* about .* TB, and 400 GB of .* free") as error:
        memory.check_memory(load("llama3-70b"))
    assert "model.num_layers=1" in error.value.hint
    memory.check_memory(load("llama3-70b", "model.num_layers=1"))


def test_hint_is_another_where_one_layer_alone_does_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "_available_bytes", lambda: 10**9)
    with pytest.raises(ConfigError) as error:
        memory.check_memory(load("llama3-8b"))
    assert "one layer alone needs" in error.value.hint
