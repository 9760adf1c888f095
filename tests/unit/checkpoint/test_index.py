import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from plait.checkpoint.index import Index, TensorRecord, list_pieces
from plait.errors import CheckpointError
from plait.sharding import KeyValueHeads, Ownership, Split, build_split
from tests.support.strategies import Heads, heads, splits

OWNED = Ownership("w", (5, 7), 1, build_split(7, 3))
FILES = {piece.file: 4 for piece in list_pieces(OWNED, 3)}


def _write(folder: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> Path:
    """A checkpoint folder with files of four bytes, its index changed by `change`."""
    index = Index(12, {"w": TensorRecord((5, 7), "float32", list_pieces(OWNED, 3))}, FILES, {"position": 3})
    body = json.loads(index.to_json())
    change(body)
    (folder / "index.json").write_text(json.dumps(body))
    for name in FILES:
        (folder / name).write_bytes(b"1234")
    return folder


@given(splits())
def test_every_element_of_a_cut_tensor_is_in_exactly_one_piece(split: Split) -> None:
    ownership = Ownership("w", (3, split.size), 1, split)
    written = [i for piece in list_pieces(ownership, split.degree) for i in _indices(piece.intervals[1])]
    assert sorted(written) == list(range(split.size))


@given(heads())
def test_replicated_heads_are_written_once(case: Heads) -> None:
    size = case.num_kv_heads * case.head_width
    split = KeyValueHeads(case.num_heads, case.num_kv_heads, case.head_width).build_split(size, case.degree)
    pieces = list_pieces(Ownership("wk", (size, 2), 0, split), case.degree)
    assert sorted(i for piece in pieces for i in _indices(piece.intervals[0])) == list(range(size))


def test_a_tensor_that_every_rank_holds_is_in_the_file_of_the_first() -> None:
    (piece,) = list_pieces(Ownership("norm.weight", (4,)), 3)
    assert piece.file == "tp-00000-of-00003.safetensors"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    index = Index.from_folder(_write(tmp_path))
    assert (index.step, index.state, dict(index.files)) == (12, {"position": 3}, FILES)
    assert index.tensors["w"] == TensorRecord((5, 7), "float32", list_pieces(OWNED, 3))


def test_a_truncated_file_is_named_with_its_bytes(tmp_path: Path) -> None:
    (_write(tmp_path) / "tp-00001-of-00003.safetensors").write_bytes(b"12")
    with pytest.raises(CheckpointError, match=r"tp-00001-of-00003.safetensors has 2 bytes of 4") as caught:
        Index.from_folder(tmp_path)
    assert caught.value.hint == "delete the folder to go on from the checkpoint before it"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (_write(tmp_path) / "tp-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: tp-00002-of-00003.safetensors is missing"):
        Index.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["tensors"]["w"]["pieces"].pop(), r"w \[5, 7\] has 25 of 35 elements"),
        (lambda body: body.pop("files"), "index.json: cannot be read .*KeyError: 'files'"),
        (lambda body: body.update(tensors=[]), "index.json: cannot be read"),
        (lambda body: body["tensors"]["w"]["pieces"][0][1].append([3, 1]), "index.json: cannot be read .*3, 1"),
        (lambda body: body["tensors"]["w"].update(shape="ab"), "index.json: cannot be read .*'str'"),
        (lambda body: body.update(format=99), "has format 99, and this version reads format 1"),
    ],
)
def test_an_index_that_is_not_whole_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Index.from_folder(_write(tmp_path, change))


def test_an_index_without_end_is_refused(tmp_path: Path) -> None:
    (_write(tmp_path) / "index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read .*RecursionError"):
        Index.from_folder(tmp_path)


def test_half_an_index_is_refused(tmp_path: Path) -> None:
    text = (_write(tmp_path) / "index.json").read_text()
    (tmp_path / "index.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read .*JSONDecodeError"):
        Index.from_folder(tmp_path)


def test_a_folder_without_an_index_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no index.json"):
        Index.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no such checkpoint folder"):
        Index.from_folder(tmp_path / "absent")


def _indices(interval: object) -> range:
    return range(interval.start, interval.stop)  # type: ignore[attr-defined]
