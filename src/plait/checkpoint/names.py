"""Names: of checkpoint folders in a run, of files in a checkpoint, of tensors in a file.

step-00000100/                     appears by rename, complete
  index.json                       global shapes, who wrote which interval, the position of the run
  tp-00000-of-00002.safetensors    what tp rank 0 counts: `model/FQN`, `optimizer/exp_avg/FQN`, ...
  tp-00001-of-00002.safetensors
.writing-00000200/                 a save under way, or one that failed; never read
"""

import re
from pathlib import Path

INDEX = "index.json"
WRITING = ".writing-"
"""How a folder begins that is written, or removed; what is in it is never read."""
_FOLDER = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    """Folder of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def writing_name(step: int) -> str:
    """Folder in which that checkpoint is written before it is renamed."""
    return f"{WRITING}{step:08d}"


def file_name(tp_rank: int, degree: int) -> str:
    """File that tp rank `tp_rank` writes."""
    return f"tp-{tp_rank:05d}-of-{degree:05d}.safetensors"


def model_name(fqn: str) -> str:
    """Name of a parameter."""
    return f"model/{fqn}"


def optimizer_name(kind: str, fqn: str) -> str:
    """Name of a parameter's optimizer tensor, `kind` being `exp_avg` or `exp_avg_sq`."""
    return f"optimizer/{kind}/{fqn}"


def history_name(tensor: str) -> str:
    """Name of the largest magnitudes that a tensor of a linear had, by which delayed scaling goes."""
    return f"amax_history/{tensor}"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = ((_FOLDER.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def find_latest(directory: Path) -> Path | None:
    """Newest checkpoint in `directory`; None where there is none.

    The name decides, not a link that may be stale: a folder gets its name only when all of it is on disk. One that was
    damaged later is still found, so that reading it says so rather than going back to an older one in silence.
    """
    found = list_checkpoints(directory)
    return found[-1][1] if found else None
