"""Whether the process of another rank on this host is still there."""

from dataclasses import dataclass
from pathlib import Path

_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat, counted behind the name of the program."""


@dataclass(frozen=True)
class Peer:
    """A process: its id may be given to another one later, its start tells them apart.

    Attributes:
        namespace: in which the id means this process.
    """

    pid: int
    started: str
    namespace: int

    @classmethod
    def of(cls, pid: int) -> "Peer":
        """The process that has this id here and now."""
        return cls(pid, _read_stat(pid)[_STARTED], _own_namespace())

    def is_gone(self) -> bool:
        """Whether the process has ended; False where that cannot be seen from here."""
        if self.namespace != _own_namespace():
            return False
        try:
            stat = _read_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        return stat[_STARTED] != self.started or stat[_STATE] in "ZX"


def _read_stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _own_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
