"""On the mesh of one rank; over several in tests/dist/checkpoint."""

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.checkpoint.index import Index
from plait.checkpoint.names import find_latest, list_checkpoints
from plait.checkpoint.part import Tensors, build_owned
from plait.checkpoint.sharded import load_checkpoint, save_checkpoint
from plait.comm.mesh import build_mesh
from plait.errors import CheckpointError
from plait.sharding import MeshShape, Ownership

MESH = build_mesh(MeshShape())


def _tensors(value: float, *, size: int = 4) -> Tensors:
    return {"w": build_owned(Ownership("w", (size,)), torch.full((size,), value))}


def _save(folder: Path, step: int, tensors: Tensors, keep: int = 0) -> Path:
    return save_checkpoint(folder, step, tensors, {"seed": 5}, MESH, keep=keep)


def test_a_checkpoint_is_found_and_read_again(tmp_path: Path) -> None:
    saved = _save(tmp_path / "runs" / "a", 7, _tensors(3.0))
    assert find_latest(tmp_path / "runs" / "a") == saved
    target = _tensors(0.0)
    index = load_checkpoint(saved, target, MESH)
    assert (index.step, index.state, target["w"].tensor.tolist()) == (7, {"seed": 5}, [3.0] * 4)


def test_whoever_may_read_the_folder_may_read_the_files(tmp_path: Path) -> None:
    saved = _save(tmp_path, 1, _tensors(1.0))
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {saved.stat().st_mode & 0o666}


def test_only_the_newest_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / ".writing-00000001").mkdir()
    for step in (2, 4, 6, 8):
        _save(tmp_path, step, _tensors(step), keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [6, 8]
    assert len(list(tmp_path.iterdir())) == 2


def test_one_that_cannot_be_removed_is_named_and_the_new_one_is_there(tmp_path: Path) -> None:
    for step in (2, 4):
        _save(tmp_path, step, _tensors(step))
    (tmp_path / ".writing-00000002").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step-00000002: cannot be removed .*, as only the newest 1 are kept"):
        _save(tmp_path, 6, _tensors(6), keep=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 4, 6]


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    _save(tmp_path, 2, _tensors(1.0))
    with pytest.raises(CheckpointError, match=r"step-00000002: exists already"):
        _save(tmp_path, 2, _tensors(2.0))


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may grow beyond 64 KiB, an error of the operating system like that of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path, full_disk: None) -> None:
    old = _save(tmp_path, 2, _tensors(1.0))
    with pytest.raises(CheckpointError, match=r"cannot be written .*File too large"):
        _save(tmp_path, 4, _tensors(2.0, size=1 << 16), keep=1)
    assert list(tmp_path.iterdir()) == [old]
    target = _tensors(0.0)
    load_checkpoint(old, target, MESH)
    assert target["w"].tensor.tolist() == [1.0] * 4


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/checkpoints/.writing-00000002: cannot be made .Not a directory"):
        _save(tmp_path / "file" / "checkpoints", 2, _tensors(1.0))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_without_a_sum_is_not_read(tmp_path: Path, name: str) -> None:
    saved = _save(tmp_path, 2, _tensors(1.0))
    index = Index.from_folder(saved)
    left = {file: summed for file, summed in index.files.items() if file != name}
    (saved / "index.json").write_text(replace(index, files=left).to_json())
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} has no sum in index.json"):
        load_checkpoint(saved, _tensors(0.0), MESH)


@pytest.mark.parametrize("damage", ["truncate", "remove", "another model"])
def test_nothing_is_overwritten_by_a_checkpoint_that_cannot_be_used(tmp_path: Path, damage: str) -> None:
    ownership = {name: Ownership(name, (4,)) for name in ("first", "second")}
    saved = _save(tmp_path, 2, {n: build_owned(o, torch.ones(4)) for n, o in ownership.items()})
    (file,) = saved.glob("*.distcp")
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "remove":
        file.unlink()
    else:
        ownership["second"] = Ownership("second", (5,))
    target = {name: build_owned(owned, torch.zeros(owned.shape)) for name, owned in ownership.items()}
    with pytest.raises(CheckpointError):
        load_checkpoint(saved, target, MESH)
    assert not any(owned.tensor.any() for owned in target.values())
