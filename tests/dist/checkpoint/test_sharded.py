import resource
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.checkpoint.background import BackgroundSave, Staging
from plait.checkpoint.names import list_checkpoints
from plait.checkpoint.part import Tensors, build_owned
from plait.checkpoint.save import Save
from plait.checkpoint.sharded import load_checkpoint, save_checkpoint
from plait.comm.launch import LocalRanks
from plait.comm.mesh import Mesh, build_mesh
from plait.errors import CheckpointError, TransportError
from plait.sharding import MeshShape, Ownership, build_split

Ranks = Callable[[int], LocalRanks]


def _build_tensors(mesh: Mesh, size: int = 11) -> Tensors:
    """One tensor cut unevenly, one whole: values are their global indices."""
    cut = Ownership("cut", (size, 3), 0, build_split(size, mesh.tp.degree))
    whole = Ownership("whole", (size,))
    own = cut.intervals(mesh.tp.rank)[0]
    values = torch.arange(3.0 * size).view(size, 3)[own.start : own.stop].clone()
    tensors = {cut: values, whole: torch.arange(float(size))}
    is_first = mesh.dp_cp.rank == 0
    return {
        each.name: build_owned(each, tensor, mesh.tp.rank, is_replica_written=is_first) for each, tensor in tensors.items()
    }


def _save(folder: Path, step: int, shape: MeshShape, size: int = 11) -> Path:
    mesh = build_mesh(shape)
    return save_checkpoint(folder, step, _build_tensors(mesh, size), {}, mesh, keep=1)


def _load(folder: Path, shape: MeshShape, size: int = 11) -> bool:
    mesh = build_mesh(shape)
    expected = _build_tensors(mesh, size)
    read = {name: replace(owned, tensor=torch.zeros_like(owned.tensor)) for name, owned in expected.items()}
    load_checkpoint(folder, read, mesh)
    return all(torch.equal(read[name].tensor, expected[name].tensor) for name in read)


def test_one_replica_of_the_data_parallel_ranks_writes_and_all_read(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(4).call(_save, folder=tmp_path, step=3, shape=MeshShape(dp_replicate=2, tp=2))
    assert len(set(saved)) == 1
    assert sorted(path.name for path in saved[0].iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "index.json",
    ]
    for shape in (MeshShape(dp_replicate=2, tp=2), MeshShape(tp=4), MeshShape(dp_replicate=4)):
        assert ranks(4).call(_load, folder=saved[0], shape=shape) == [True] * 4


def _save_on_full_disk(folder: Path, step: int, full_rank: int) -> Path:
    """One rank may write no file beyond 64 KiB, an error of the operating system like that of a full disk."""
    mesh = build_mesh(MeshShape(tp=2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        return _save(folder, step, MeshShape(tp=2), size=1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_of_one_rank_is_one_error_and_the_old_checkpoint_stays(
    ranks: Ranks, tmp_path: Path, full_rank: int
) -> None:
    (old, _) = ranks(2).call(_save, folder=tmp_path, step=1, shape=MeshShape(tp=2))
    with pytest.raises(CheckpointError, match=f"^rank {full_rank}: .*__{full_rank}_0.distcp: cannot be written .File too large"):
        ranks(2).call(_save_on_full_disk, folder=tmp_path, step=2, full_rank=full_rank)
    assert list(tmp_path.iterdir()) == [old]
    assert ranks(2).call(_load, folder=old, shape=MeshShape(tp=2)) == [True, True]


def test_a_folder_that_cannot_be_written_is_one_error(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be made \(Not a directory\)"):
        ranks(2).call(_save, folder=tmp_path / "file", step=1, shape=MeshShape(tp=2))


def test_a_file_that_one_rank_needs_and_is_damaged_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    (saved, _) = ranks(2).call(_save, folder=tmp_path, step=1, shape=MeshShape(tp=2))
    file = saved / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"is damaged: __1_0.distcp has \d+ bytes of \d+"):
        ranks(2).call(_load, folder=saved, shape=MeshShape(tp=2))


@pytest.fixture(scope="module")
def hasty_ranks() -> Iterator[LocalRanks]:
    """Two ranks that wait for each other for three seconds only."""
    with LocalRanks(2, timeout_s=3.0, device_type="cpu") as ranks:
        yield ranks


def _save_unless(folder: Path, absent: int) -> None:
    if build_mesh(MeshShape(tp=2)).rank != absent:
        _save(folder, 2, MeshShape(tp=2))


def test_a_save_that_one_rank_does_not_join_ends_and_names_it(hasty_ranks: Any, tmp_path: Path) -> None:
    """FIELD 3.35: saving on some ranks only is no deadlock but an error that names the absent."""
    (old, _) = hasty_ranks.call(_save, folder=tmp_path, step=1, shape=MeshShape(tp=2))
    with pytest.raises(TransportError) as caught:
        hasty_ranks.call(_save_unless, folder=tmp_path, absent=1)
    assert "rank 1" in str(caught.value)
    assert "share" in str(caught.value)
    assert [path for _, path in list_checkpoints(tmp_path)] == [old]


def _save_while_going_on(folder: Path, failing_rank: int | None = None) -> tuple[Path, bool]:
    """Two saves through a thread, the second of values that change while it is written."""
    mesh, staging = build_mesh(MeshShape(tp=2)), Staging()
    for step in (1, 2):
        tensors = _build_tensors(mesh)
        write_here = mesh.rank != failing_rank or step == 1
        with nullcontext() if write_here else patch.object(Save, "write", side_effect=CheckpointError("disk: is full")):
            save = BackgroundSave(Save(folder, step, {"step": step}), staging.copy(tensors), mesh)
            for owned in tensors.values():
                owned.tensor.zero_()
            final = save.finish()
    return final, _load(final, MeshShape(tp=2))


def test_what_threads_of_all_ranks_wrote_is_one_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    final = tmp_path / "step-00000002"
    assert ranks(2).call(_save_while_going_on, folder=tmp_path) == [(final, True)] * 2
    assert sorted(path.name for path in final.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "index.json"]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_thread_that_fails_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path, failing_rank: int) -> None:
    with pytest.raises(CheckpointError, match=f"^rank {failing_rank}: disk: is full"):
        ranks(2).call(_save_while_going_on, folder=tmp_path, failing_rank=failing_rank)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "index.json"])
def test_one_flipped_bit_of_any_file_is_found_by_all_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, file: str
) -> None:
    (saved, _) = ranks(2).call(_save, folder=tmp_path, step=1, shape=MeshShape(tp=2))
    content = bytearray((saved / file).read_bytes())
    content[len(content) // 2] ^= 4
    (saved / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file}"):
        ranks(2).call(_load, folder=saved, shape=MeshShape(tp=2))
