import json
from pathlib import Path
from typing import Any

import pytest

from plait.config.data import DataConfig
from plait.errors import ConfigError
from plait.train.corpus.sources import list_files, read_documents


def _config(*paths: Path | str, kind: str = "text", **fields: Any) -> DataConfig:
    tokenizer = None if kind == "tokens" else "tokenizer.json"
    return DataConfig(kind=kind, paths=tuple(map(str, paths)), tokenizer=tokenizer, **fields)


def _write(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_folder_gives_its_files_by_name_without_hidden_and_empty_ones(tmp_path: Path) -> None:
    wanted = [_write(tmp_path / name) for name in ("a/2.txt", "a/b/1.py", "c.txt")]
    for name in (".git/config", "a/.hidden"):
        _write(tmp_path / name)
    _write(tmp_path / "empty.txt", "")
    assert list_files(_config(tmp_path)) == wanted


def test_a_pattern_may_reach_into_folders(tmp_path: Path) -> None:
    wanted = [_write(tmp_path / "a/x.py"), _write(tmp_path / "b.py")]
    _write(tmp_path / "b.txt")
    assert list_files(_config(f"{tmp_path}/**/*.py")) == wanted


def test_a_file_named_twice_is_taken_once(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.txt")
    assert list_files(_config(path, tmp_path)) == [path]


def test_only_files_of_the_kind_are_taken_from_a_folder(tmp_path: Path) -> None:
    lines, tokens = _write(tmp_path / "a.jsonl"), _write(tmp_path / "b.npy")
    _write(tmp_path / "notes.md")
    assert list_files(_config(tmp_path, kind="jsonl")) == [lines]
    assert list_files(_config(tmp_path, kind="tokens")) == [tokens]


def test_all_paths_that_lead_to_nothing_are_reported_at_once(tmp_path: Path) -> None:
    empty, folder = _write(tmp_path / "empty.txt", ""), tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError) as caught:
        list_files(_config(empty, folder, tmp_path / "absent.txt", f"{tmp_path}/*.none"))
    assert caught.value.message.startswith("data.paths: 4 problems")
    for problem in (
        f"{empty}: the file is empty",
        f"{folder}: no file with anything in it in this folder",
        f"{tmp_path}/absent.txt: no such file or folder",
        f"{tmp_path}/*.none: no file matches this pattern",
    ):
        assert problem in caught.value.message


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.txt", "one\n\ntwo\n")
    assert list(read_documents(_config(path), path)) == ["one\n\ntwo\n"]


def test_a_line_of_json_is_one_document(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", '{"body": "one"}\n\n{"body": "two", "id": 3}\n')
    assert list(read_documents(_config(path, kind="jsonl", text_key="body"), path)) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "a.jsonl:2: is not JSON"),
        (json.dumps({"body": "one", "id": 1}), "a.jsonl:2: has no text under 'text', only 'body', 'id'"),
        (json.dumps({"text": 5}), "a.jsonl:2: has no text under 'text', only a value of type int"),
        (json.dumps({}), "a.jsonl:2: has no text under 'text', only an empty object"),
        ('{"text": "\\ud800"}', "a.jsonl:2: the text has half a character"),
        ("[" * 100_000, "a.jsonl:2: is not JSON .*recursion"),
        (json.dumps(["text"]), "a.jsonl:2: has no text under 'text', only a list"),
    ],
)
def test_a_line_without_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = _write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        list(read_documents(_config(path, kind="jsonl"), path))


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_file_that_is_not_text_is_named_with_the_byte(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"ab\xff\xfe")
    with pytest.raises(ConfigError, match=r"a.bin: is not UTF-8 text \(byte 2 is 0xff\)"):
        list(read_documents(_config(path, kind=kind), path))
