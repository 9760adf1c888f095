"""The checkpoints that a run writes: at once, or by a thread while the next steps are taken."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plait.checkpoint.background import BackgroundSave, Staging
from plait.checkpoint.save import Save
from plait.checkpoint.sharded import save_checkpoint
from plait.errors import TransportError
from plait.train.state import Position, build_state, checkpoint_folder, list_tensors
from plait.train.step import Trainer


class Saves:
    """Writes the checkpoints of a run; one at a time, and the last is waited for.

    With `train.async_checkpoint` a save copies what this rank writes to the CPU and returns. If writing it fails, the
    run is to stop: the next save, or the end, raises the error on every rank.
    """

    def __init__(self, trainer: Trainer, identity: Mapping[str, Any]) -> None:
        self._trainer, self._identity = trainer, identity
        self._staging = Staging()
        self._under_way: BackgroundSave | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Wait for the save under way. After an error nobody is asked: it may be that of a rank that is lost.

        One that is interrupted at once is given up.
        """
        if error is None:
            self.finish()
        elif self._under_way is not None and isinstance(error, TransportError | KeyboardInterrupt):
            self._under_way.abandon()
        elif self._under_way is not None:
            self._under_way.end(self._trainer.run.train.timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save under way will fail."""
        return self._under_way is not None and self._under_way.has_failed

    def save(self, position: Position) -> Path:
        """Save a checkpoint, on every rank, and return the folder that it has, or will have.

        Raises:
            CheckpointError: on every rank, if this save, or the one before it, failed on any.
        """
        self.finish()
        trainer = self._trainer
        run = trainer.run
        directory, state = checkpoint_folder(run), build_state(trainer, position, self._identity)
        tensors = list_tensors(trainer)
        if not run.train.async_checkpoint:
            keep = run.train.keep_checkpoints
            return save_checkpoint(directory, position.step, tensors, state, trainer.mesh, keep=keep)
        save = Save(directory, position.step, state, run.train.keep_checkpoints)
        self._under_way = BackgroundSave(save, self._staging.copy(tensors), trainer.mesh)
        return save.final

    def finish(self) -> None:
        """Wait for the save under way, on every rank.

        Raises:
            CheckpointError: on every rank, if it failed on any.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.finish()
