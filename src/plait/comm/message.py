"""What a launcher and its local ranks send each other."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setup:
    """What a rank has to know to start."""

    rank: int
    world_size: int
    timeout_s: float
    device_type: str | None
    """None to choose: CUDA where it is available."""
    directory: Path
    """Shared by the ranks, removed when they end."""
    launcher: int
    """Process id."""

    @property
    def notes(self) -> Path:
        """Where the rank notes its latest collectives."""
        return self.directory / f"notes-{self.rank}"


@dataclass(frozen=True)
class Task:
    """A call to run on every rank: a pickled function and its keyword arguments."""

    payload: bytes
    script: str | None
    """The file that defines what the payload names in `__main__`, if it names anything there."""


@dataclass(frozen=True)
class Result:
    """What a call returned, pickled."""

    payload: bytes
