from pathlib import Path

import pytest

from plait.checkpoint.names import (
    find_latest,
    folder_name,
    history_name,
    kind_of,
    list_checkpoints,
    list_keys,
    model_name,
    optimizer_name,
    writing_name,
)


def test_the_highest_step_is_the_latest_whatever_was_written_last(tmp_path: Path) -> None:
    for step in (1_000_000_000, 9, 120):
        (tmp_path / folder_name(step)).mkdir()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 120, 1_000_000_000]
    assert find_latest(tmp_path) == tmp_path / folder_name(1_000_000_000)


@pytest.mark.parametrize("name", [writing_name(7), "step-7", "step-00000007.damaged", "old", "latest"])
def test_what_is_not_a_complete_checkpoint_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / folder_name(8)).write_text("a file, not a folder")
    assert find_latest(tmp_path) is None


def test_a_run_without_a_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (model_name("layers.0.norm.weight"), ("model", "layers.0.norm.weight")),
        (optimizer_name("exp_avg", "layers.0.w"), ("optimizer", "exp_avg", "layers.0.w")),
        (history_name("layers.0.w/x"), ("amax_history", "layers.0.w/x")),
        ("state", ("state",)),
    ],
)
def test_plain_torch_gets_nested_dicts(name: str, keys: tuple[str, ...]) -> None:
    assert list_keys(name) == keys
    assert (kind_of(name), ".".join(keys)) == (keys[0], name)
