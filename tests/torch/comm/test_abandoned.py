"""Files that somebody holds, on file systems with locks and without."""

import errno
import os

import pytest

from plait.comm.shared import abandoned


def test_what_nobody_holds_is_removed_and_what_somebody_holds_is_not(tmp_path) -> None:
    held, left = tmp_path / "held", tmp_path / "left"
    descriptors = {path: abandoned.create_held(path) for path in (held, left)}
    os.close(descriptors[left])
    abandoned.remove_abandoned([held, left, tmp_path / "gone"])
    assert list(tmp_path.iterdir()) == [held]
    os.close(descriptors[held])


def test_where_there_are_no_locks_files_are_made_and_none_is_removed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre that is mounted without flock."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(abandoned.fcntl, "flock", refuse)
    path = tmp_path / "made"
    os.close(abandoned.create_held(path))
    abandoned.remove_abandoned([path])
    assert path.exists()
