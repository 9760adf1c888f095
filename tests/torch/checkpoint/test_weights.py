import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait.checkpoint.shards import SINGLE_FILE, WEIGHT_INDEX
from plait.checkpoint.weights import WeightFiles, derive_fingerprint
from plait.errors import CheckpointError
from plait.sharding import Interval

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _save_two(folder: Path) -> None:
    save_file({"a": torch.arange(12.0).view(3, 4)}, folder / ONE)
    save_file({"b": torch.ones(2, dtype=torch.bfloat16)}, folder / TWO)
    _save_index(folder, {"a": ONE, "b": TWO})


def _save_index(folder: Path, weight_map: object) -> None:
    (folder / WEIGHT_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _read_error(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        WeightFiles.from_folder(folder)
    return str(caught.value)


def test_pieces_are_read_from_the_file_that_holds_them(tmp_path: Path) -> None:
    _save_two(tmp_path)
    files = WeightFiles.from_folder(tmp_path)
    assert {name: (entry.file, *entry.spec) for name, entry in files.entries.items()} == {
        "a": (ONE, torch.float32, (3, 4)),
        "b": (TWO, torch.bfloat16, (2,)),
    }
    assert files.read("a", (Interval(1, 3), Interval(0, 2))).tolist() == [[4, 5], [8, 9]]


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / SINGLE_FILE)
    assert list(WeightFiles.from_folder(tmp_path).entries) == ["a"]


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    _save_two(tmp_path)
    (tmp_path / TWO).unlink()
    assert f"{TWO} is missing, which {WEIGHT_INDEX} names" in _read_error(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    _save_two(tmp_path)
    _save_index(tmp_path, {"a": ONE, "b": ONE})
    assert f"b is not in the file that {WEIGHT_INDEX} says" in _read_error(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 60, -1], ids="bytes {}".format)
def test_a_truncated_file_is_an_error(tmp_path: Path, kept: int) -> None:
    _save_two(tmp_path)
    (tmp_path / TWO).write_bytes((tmp_path / TWO).read_bytes()[:kept])
    assert f"{TWO}: cannot be read" in _read_error(tmp_path)


@pytest.mark.parametrize("weight_map", [None, 3, {"a": 3}, {"a": "../other/model.safetensors"}, ["a"]], ids=json.dumps)
def test_an_index_that_is_none_is_an_error(tmp_path: Path, weight_map: object) -> None:
    _save_two(tmp_path)
    _save_index(tmp_path, weight_map)
    assert f"{WEIGHT_INDEX}: cannot be read" in _read_error(tmp_path)


def test_a_directory_without_weights_says_what_it_has_instead(tmp_path: Path) -> None:
    assert "there is no such directory" in _read_error(tmp_path / "nowhere")
    assert "has no weights: there is neither model.safetensors nor model.safetensors.index.json" in _read_error(
        tmp_path
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "hint: pytorch_model.bin is not read: load it with transformers" in _read_error(tmp_path)


def test_other_weights_have_another_fingerprint_wherever_they_are(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, value in zip(folders, (1.0, 1.0, 1.5), strict=True):
        folder.mkdir()
        save_file({"a": torch.full((1000,), value)}, folder / SINGLE_FILE)
    one, same, other = map(derive_fingerprint, folders)
    assert one == same != other
