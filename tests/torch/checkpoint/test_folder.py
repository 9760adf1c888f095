from pathlib import Path

import pytest

from plait.checkpoint.folder import begin_folder, discard_folder, publish_folder
from plait.errors import CheckpointError


def _write(final: Path, text: str, *, overwrite: bool = False) -> None:
    writing = begin_folder(final, overwrite=overwrite)
    (writing / "config.json").write_text(text)
    publish_folder(writing, final)


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    writing = begin_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a" / "b").exists()
    (writing / "config.json").write_text("x")
    publish_folder(writing, tmp_path / "a" / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_one_that_exists_is_replaced_only_if_allowed(tmp_path: Path) -> None:
    _write(tmp_path / "model", "old")
    with pytest.raises(CheckpointError, match="model: exists already"):
        begin_folder(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    _write(tmp_path / "model", "new", overwrite=True)
    assert (tmp_path / "model" / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_replaced_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "model", "old")
    writing, rename = begin_folder(tmp_path / "model", overwrite=True), Path.rename
    (writing / "config.json").write_text("new")

    def refuse(path: Path, target: Path) -> Path:
        if path == writing:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="model: cannot be written .Input/output error."):
        publish_folder(writing, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "old"


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("x")
    with pytest.raises(CheckpointError, match="home: is not overwritten, as it is no checkpoint"):
        begin_folder(tmp_path / "home", overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name in ("home/letter.txt", "link"):
        with pytest.raises(CheckpointError, match="is in the way, and is no folder"):
            begin_folder(tmp_path / name, overwrite=True)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    _write(tmp_path / "model", "x")
    assert (tmp_path / "model" / "config.json").read_text() == "x"


def test_a_folder_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    writing = begin_folder(tmp_path / "model")
    (writing / "config.json").write_text("x")
    discard_folder(writing)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_is_not_in_the_way(tmp_path: Path) -> None:
    (begin_folder(tmp_path / "model") / "half").write_text("x")
    _write(tmp_path / "model", "y")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be made \(Not a directory\)"):
        begin_folder(tmp_path / "file" / "model")
