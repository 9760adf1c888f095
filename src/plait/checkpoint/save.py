"""The steps of a save: a folder, a file from every rank, and then the name by which it is found."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem

from plait.checkpoint.names import (
    INDEX,
    STATE,
    WRITING,
    damaged_folder,
    file_name,
    folder_name,
    list_checkpoints,
    part_name,
    writing_name,
)
from plait.checkpoint.part import Owned, Tensors
from plait.checkpoint.safetensors import sync
from plait.checkpoint.write import Part, write_metadata, write_part
from plait.errors import CheckpointError


def set_aside(folder: Path) -> None:
    """Take its name from a damaged checkpoint, for the next one of this step; what is left of it may be looked at.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    target = damaged_folder(folder)
    try:
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be renamed to {target.name} ({error.strerror})") from error


@dataclass(frozen=True)
class Save:
    """One checkpoint to be written to `directory`, after which its newest `keep` are kept (0: all)."""

    directory: Path
    step: int
    state: Mapping[str, Any]
    keep: int = 0

    @property
    def writing(self) -> Path:
        """Where it is written."""
        return self.directory / writing_name(self.step)

    @property
    def final(self) -> Path:
        """Where it is when it is complete."""
        return self.directory / folder_name(self.step)

    def begin(self) -> None:
        """Make the folder to write to; one rank does.

        Raises:
            CheckpointError: it cannot be made, or the checkpoint is there already.
        """
        if self.final.exists():
            raise CheckpointError(
                f"{self.final}: exists already", hint="give the run another name, or delete the folder"
            )
        try:
            shutil.rmtree(self.writing, ignore_errors=True)
            self.writing.mkdir(parents=True)
        except OSError as error:
            message = f"{self.writing}: cannot be made ({error.strerror})"
            raise CheckpointError(message, hint="set out_dir and name") from error

    def write(self, tensors: Tensors, rank: int, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Write what `rank` writes, if that is anything, and leave a note of it for the first rank.

        Raises:
            CheckpointError: it cannot be written, or is not wanted any more.
        """
        held: dict[str, Any] = dict(tensors)
        if rank == 0:
            held[STATE] = dict(self.state)
        items = create_default_local_save_plan(held, is_coordinator=rank == 0).items

        def resolve(item: WriteItem) -> Any:
            if not is_wanted():
                raise CheckpointError(f"{self.writing}: was given up")
            found = held[item.index.fqn]
            return found.tensor if isinstance(found, Owned) else found

        part = write_part(self.writing, file_name(rank), items, resolve) if items else None
        note, beside = self.writing / part_name(rank), self.writing / f".{part_name(rank)}"
        try:
            beside.write_text("" if part is None else part.to_json(), encoding="utf-8")
            beside.rename(note)
        except OSError as error:
            raise CheckpointError(f"{note}: cannot be written ({error.strerror})") from error

    def has_note(self, rank: int) -> bool:
        """Whether `rank` has written all that it writes."""
        return (self.writing / part_name(rank)).is_file()

    def publish(self, num_ranks: int) -> None:
        """Make a checkpoint of what all ranks wrote, and give it its name; one rank does.

        Raises:
            CheckpointError: it cannot be written, or is, and one that is not kept cannot be removed.
        """
        try:
            parts = [self._take_note(rank) for rank in range(num_ranks)]
            write_metadata(self.writing, self.step, self.state, [part for part in parts if part is not None])
            sync(self.writing / INDEX)
            sync(self.writing)
            self.writing.rename(self.final)
            sync(self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.final}: cannot be written ({error.strerror})") from error
        self._prune()

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.writing, ignore_errors=True)

    def _take_note(self, rank: int) -> Part | None:
        path = self.writing / part_name(rank)
        text = path.read_text(encoding="utf-8")
        path.unlink()
        return Part.from_json(text) if text else None

    def _prune(self) -> None:
        """Remove old checkpoints, and what failed saves left. Each loses its name first: half of one is never found."""
        for step, folder in list_checkpoints(self.directory)[: -self.keep] if self.keep else ():
            try:
                folder.rename(self.directory / writing_name(step))
            except OSError as error:
                raise CheckpointError(
                    f"{folder}: cannot be removed ({error.strerror}), as only the newest {self.keep} are kept"
                ) from error
        for leftover in self.directory.glob(f"{WRITING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
