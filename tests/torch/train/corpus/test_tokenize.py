import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.comm.mesh import build_mesh
from plait.config.data import DataConfig
from plait.config.presets import load_preset
from plait.config.run import RunConfig
from plait.errors import ConfigError
from plait.sharding import MeshShape
from plait.train.corpus import tokenize
from plait.train.corpus.tokenize import check_data, prepare_tokens
from plait.train.corpus.tokens import TokenStream
from tests.support.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, build_byte_tokenizer, save_byte_tokenizer

DOCUMENTS = ["one", "", "tw\u00f6\n"]


def _run(folder: Path, *, vocab_size: int = VOCAB_SIZE, **data: Any) -> RunConfig:
    fields: dict[str, Any] = {"kind": "jsonl", "paths": (str(folder / "a.jsonl"),)}
    if data.get("kind") != "tokens":
        fields["tokenizer"] = str(folder / "tokenizer.json")
    model = load_preset("llama-tiny").model_copy(update={"vocab_size": vocab_size})
    return RunConfig(out_dir=str(folder / "runs"), model=model, data=DataConfig(**fields | data))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS))
    return tmp_path


def _prepare(run: RunConfig) -> TokenStream:
    return prepare_tokens(run, build_mesh(MeshShape()))


def test_documents_are_separated_by_the_end_of_text_token(folder: Path) -> None:
    stream = _prepare(_run(folder))
    assert build_byte_tokenizer().decode(stream.read(0, len(stream)), skip_special_tokens=False) == END_OF_TEXT.join(
        [*DOCUMENTS, ""]
    )


def test_text_is_tokenised_once_until_something_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _prepare(_run(folder))
    (first,) = (folder / "runs" / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "_write_tokens", _refuse)
        _prepare(_run(folder))
    (folder / "a.jsonl").write_text(json.dumps({"text": "something longer than before, and different"}))
    stream = _prepare(_run(folder))
    assert len(stream) == 44
    assert {first} < set((folder / "runs" / "cache").iterdir())


def test_nothing_half_written_is_found_after_a_failure(folder: Path) -> None:
    with (folder / "a.jsonl").open("a") as lines:
        lines.write("\nbroken\n")
    with pytest.raises(ConfigError, match=r"a.jsonl:4: is not JSON"):
        _prepare(_run(folder))
    assert list((folder / "runs" / "cache").iterdir()) == []


def test_a_vocabulary_larger_than_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"token ids up to 256, and the model has model.vocab_size = 256") as caught:
        check_data(_run(folder, vocab_size=256))
    assert caught.value.hint == "set model.vocab_size = 257, or use the tokenizer of this model"


def test_token_shards_with_a_larger_id_are_refused(folder: Path) -> None:
    np.save(folder / "b.npy", np.array([0, 300, 1] * 50))
    run = _run(folder, kind="tokens", paths=(str(folder / "b.npy"),))
    check_data(run)
    with pytest.raises(ConfigError, match=r"b.npy: has token id 300, and the model has model.vocab_size = 257"):
        _prepare(run)


def test_token_shards_are_used_where_they_are(folder: Path) -> None:
    np.save(folder / "b.npy", np.arange(5))
    np.save(folder / "c.npy", np.arange(5, 9))
    stream = _prepare(_run(folder, kind="tokens", paths=(str(folder),)))
    assert stream.read(0, len(stream)).tolist() == list(range(9))
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tokenizer": "absent.json"}, "data.tokenizer: absent.json: no such file"),
        ({"tokenizer": "a.jsonl"}, "a.jsonl: is no JSON file of `tokenizers`"),
        ({"end_of_text": "<none>"}, "has no token <none> to put between documents"),
        ({"paths": ("absent.jsonl",)}, "data.paths: absent.jsonl: no such file or folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        check_data(_run(folder, **data))


def test_training_without_data_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data: is required for training"):
        check_data(_run(folder).model_copy(update={"data": None}))


def _refuse(*_: object) -> None:
    raise AssertionError("tokenised twice")
