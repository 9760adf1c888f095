import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from plait.checkpoint.index import FileSum, Index, sum_file
from plait.errors import CheckpointError

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata")
HINT = 'delete the folder, or set train.resume = "last_good", to go on from the checkpoint before it'


def _write(folder: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> Path:
    """A checkpoint folder with files of four bytes, its index changed by `change`."""
    files = {name: FileSum(4, crc32(b"1234")) for name in FILES}
    body = json.loads(Index(12, {"position": 3, "ratio": 0.1, "pair": (1, 2)}, files).to_json())
    change(body)
    (folder / "index.json").write_text(json.dumps(body))
    for name in FILES:
        (folder / name).write_bytes(b"1234")
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    index = Index.from_folder(_write(tmp_path))
    assert (index.step, index.state) == (12, {"position": 3, "ratio": 0.1, "pair": [1, 2]})
    assert index.files["__1_0.distcp"] == sum_file(tmp_path / "__1_0.distcp")
    index.check_files(tmp_path, index.files)


def test_a_truncated_file_is_named_with_its_bytes(tmp_path: Path) -> None:
    (_write(tmp_path) / "__1_0.distcp").write_bytes(b"12")
    with pytest.raises(CheckpointError, match=r"is damaged: __1_0.distcp has 2 bytes of 4") as caught:
        Index.from_folder(tmp_path)
    assert caught.value.hint == HINT


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (_write(tmp_path) / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: .metadata is missing"):
        Index.from_folder(tmp_path)


@pytest.mark.parametrize("bit", [0, 13, 31])
def test_one_bit_that_is_not_what_was_written_is_found(tmp_path: Path, bit: int) -> None:
    index = Index.from_folder(_write(tmp_path))
    flipped = int.from_bytes(b"1234") ^ (1 << bit)
    (tmp_path / "__0_0.distcp").write_bytes(flipped.to_bytes(4))
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0.distcp does not hold what was written"):
        index.check_files(tmp_path, index.files)
    index.check_files(tmp_path, FILES[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("files"), "index.json: cannot be read .*text is not what was written"),
        (
            lambda body: body["state"].update(position=4),
            "index.json: cannot be read .*text is not what was written",
        ),
        (lambda body: body.pop("crc32"), "index.json: cannot be read .*KeyError: 'crc32'"),
        (lambda body: body.update(format=99), "has format 99, and this version reads format 2"),
        (lambda body: body.update(format=1), "has format 1, and this version reads format 2"),
    ],
)
def test_an_index_that_is_not_what_was_written_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Index.from_folder(_write(tmp_path, change))


def test_a_checkpoint_of_the_format_before_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"format": 1, "step": 3, "state": {}, "files": {}, "tensors": {}}')
    with pytest.raises(CheckpointError, match="has format 1, and this version reads format 2") as caught:
        Index.from_folder(tmp_path)
    assert "plait convert" in str(caught.value.hint)


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
    with pytest.raises(CheckpointError, match=r"has no index.json, so it is not a checkpoint"):
        Index.from_folder(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no index.json, only the .metadata of torch"):
        Index.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no such checkpoint folder"):
        Index.from_folder(tmp_path / "absent")
