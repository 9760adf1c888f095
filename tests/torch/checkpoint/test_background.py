"""Saves that a thread writes, on the mesh of one rank; over several in tests/dist/checkpoint."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from plait.checkpoint import background
from plait.checkpoint.background import BackgroundSave, Staging
from plait.checkpoint.names import list_checkpoints
from plait.checkpoint.part import Tensors, build_owned
from plait.checkpoint.save import Save
from plait.checkpoint.sharded import load_checkpoint
from plait.comm.mesh import build_mesh
from plait.errors import CheckpointError, TransportError
from plait.sharding import MeshShape, Ownership
from tests.support.checkpoints import read_tensors
from tests.support.file_limit import limited

MESH = build_mesh(MeshShape())


def _tensors(value: float, size: int = 4) -> Tensors:
    return {"model.w": build_owned(Ownership("model.w", (size,)), torch.full((size,), value))}


def _held_up(release: threading.Event) -> Callable[..., None]:
    """A save that waits before it writes."""
    write = Save.write

    def wait_and_write(*arguments: object) -> None:
        assert release.wait(60)
        write(*arguments)  # type: ignore[arg-type]

    return wait_and_write


def test_training_may_change_what_is_being_written(tmp_path: Path) -> None:
    tensors, release = _tensors(3.0), threading.Event()
    with patch.object(Save, "write", _held_up(release)):
        save = BackgroundSave(Save(tmp_path, 5, {}), Staging().copy(tensors), MESH)
        tensors["model.w"].tensor.fill_(4.0)
        assert list_checkpoints(tmp_path) == []
        release.set()
        folder = save.finish()
    assert folder == tmp_path / "step-00000005"
    assert read_tensors(folder)["model.w"].tolist() == [3.0] * 4


def test_a_copy_takes_the_memory_of_the_one_before_and_only_what_is_written() -> None:
    staging, tensors = Staging(), _tensors(3.0)
    first = staging.copy({**tensors, "elsewhere": replace(tensors["model.w"], is_written=False)})
    assert (first.keys(), staging.size_bytes) == ({"model.w"}, 16)
    tensors["model.w"].tensor.fill_(4.0)
    second = staging.copy(tensors)
    assert second["model.w"].tensor.data_ptr() == first["model.w"].tensor.data_ptr()
    assert (second["model.w"].tensor.tolist(), staging.size_bytes) == ([4.0] * 4, 16)


def test_a_rank_that_is_lost_as_a_save_begins_leaves_nothing_half_begun(tmp_path: Path) -> None:
    @contextmanager
    def lose_another(_: object) -> Iterator[None]:
        yield
        raise TransportError("rank 1 has died")

    with patch.object(background, "together", lose_another), pytest.raises(TransportError, match="rank 1 has died"):
        BackgroundSave(Save(tmp_path, 2, {}), _tensors(1.0), MESH)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_of_the_one_who_waits_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    old = BackgroundSave(Save(tmp_path, 2, {}), _tensors(1.0), MESH).finish()
    with limited(1 << 16):
        save = BackgroundSave(Save(tmp_path, 4, {}, keep=1), _tensors(2.0, size=1 << 16), MESH)
        save._thread.join()
    assert save.has_failed
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: cannot be written .File too large"):
        save.finish()
    assert list(tmp_path.iterdir()) == [old]
    assert read_tensors(old)["model.w"].tolist() == [1.0] * 4


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    release = threading.Event()
    with patch.object(Save, "write", _held_up(release)):
        save = BackgroundSave(Save(tmp_path, 4, {}), _tensors(2.0), MESH)
        threading.Timer(0.05, release.set).start()
        save.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_would_never_end_is_given_up_after_a_while(tmp_path: Path) -> None:
    """The note of another rank, which is lost, never comes."""
    with patch.object(Save, "has_note", lambda self, rank: False):
        save = BackgroundSave(Save(tmp_path, 4, {}), _tensors(2.0), MESH)
        save.end(timeout_s=0.2)
    assert list(tmp_path.iterdir()) == []
    save = BackgroundSave(Save(tmp_path, 6, {}), _tensors(2.0), MESH)
    save.end(timeout_s=60)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [6]


def _die_while_saving(folder: Path) -> None:
    BackgroundSave(Save(folder, 2, {}), _tensors(1.0), MESH).finish()

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with patch("plait.checkpoint.save.write_metadata", die):
        BackgroundSave(Save(folder, 4, {}), _tensors(2.0), MESH).finish()


def test_a_kill_leaves_the_checkpoint_before_and_the_next_save_clears_up(tmp_path: Path) -> None:
    process = get_context("spawn").Process(target=_die_while_saving, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-00000004", "step-00000002"]
    target = _tensors(0.0)
    load_checkpoint(tmp_path / "step-00000002", target, MESH)
    assert target["model.w"].tensor.tolist() == [1.0] * 4
    BackgroundSave(Save(tmp_path, 6, {}), _tensors(3.0), MESH).finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000006"]
