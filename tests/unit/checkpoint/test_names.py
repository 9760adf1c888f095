from pathlib import Path

import pytest

from plait.checkpoint.names import find_latest, folder_name, list_checkpoints, writing_name


def test_the_highest_step_is_the_latest_whatever_was_written_last(tmp_path: Path) -> None:
    for step in (1_000_000_000, 9, 120):
        (tmp_path / folder_name(step)).mkdir()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 120, 1_000_000_000]
    assert find_latest(tmp_path) == tmp_path / folder_name(1_000_000_000)


@pytest.mark.parametrize("name", [writing_name(7), "step-7", "step-00000007.bak", "old", "latest"])
def test_what_is_not_a_complete_checkpoint_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / folder_name(8)).write_text("a file, not a folder")
    assert find_latest(tmp_path) is None


def test_a_run_without_a_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent") is None
