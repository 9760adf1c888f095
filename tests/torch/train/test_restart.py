"""What is left of runs whose ranks `plait train` started itself; with ranks in tests/dist/train/test_faults.py."""

from pathlib import Path

import pytest

from plait.config.run import FineTuneConfig, RunConfig
from plait.errors import TransportError
from plait.train.faults.restart import train_with_restarts
from plait.train.state import checkpoint_folder
from tests.support.training import build_run


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TransportError("rank 1 died")], ids=repr)
def test_what_an_interrupted_run_was_writing_is_removed_and_what_is_complete_stays(
    tmp_path: Path, error: BaseException
) -> None:
    def write_and_end(run: RunConfig | FineTuneConfig) -> None:
        for name in ("step-00000002", ".writing-00000004"):
            (checkpoint_folder(run) / name).mkdir(parents=True)
        raise error

    run = build_run(tmp_path, steps=6)
    with pytest.raises(type(error)):
        train_with_restarts(run, write_and_end)
    assert [path.name for path in checkpoint_folder(run).iterdir()] == ["step-00000002"]
