"""Names: of checkpoint folders in a run, of files in a checkpoint, of tensors in a file.

step-00000100/          appears by rename, complete
  index.json            the position and config of the run, and the checksum of every file
  .metadata             of torch: global shapes, who wrote which interval, and where it is
  __0_0.distcp          what rank 0 wrote: `model.FQN`, `optimizer.exp_avg.FQN`, ...
  __1_0.distcp
.writing-00000200/      a save under way, or one that failed; never read
step-00000100.damaged/  one that `train.resume = "last_good"` passed over; never read
"""

import re
from pathlib import Path

INDEX = "index.json"
METADATA = ".metadata"
WRITING = ".writing-"
"""How a folder begins that is written, or removed; what is in it is never read."""
STATE = "state"
"""The tensors' neighbour: what the index says of the run, for whoever reads a checkpoint with torch alone."""
_FOLDER = re.compile(r"step-(\d{8,})")
_DAMAGED = ".damaged"


def folder_name(step: int) -> str:
    """Folder of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def writing_name(step: int) -> str:
    """Folder in which that checkpoint is written before it is renamed."""
    return f"{WRITING}{step:08d}"


def damaged_folder(folder: Path) -> Path:
    """Where a damaged checkpoint is moved out of the way of the next one of this step."""
    return folder.with_name(f"{folder.name}{_DAMAGED}")


def file_name(rank: int) -> str:
    """File that a rank writes."""
    return f"__{rank}_0.distcp"


def part_name(rank: int) -> str:
    """File by which a rank tells the first one, while both write, that it is done, and what it wrote."""
    return f"written-{rank}"


def model_name(fqn: str) -> str:
    """Name of a parameter."""
    return f"model.{fqn}"


def optimizer_name(kind: str, fqn: str) -> str:
    """Name of a parameter's optimizer tensor, `kind` being `exp_avg` or `exp_avg_sq`."""
    return f"optimizer.{kind}.{fqn}"


def history_name(tensor: str) -> str:
    """Name of the largest magnitudes that a tensor of a linear had, by which delayed scaling goes."""
    return f"amax_history.{tensor}"


def kind_of(name: str) -> str:
    """What a tensor is: `model`, `optimizer` or `amax_history`."""
    return name.partition(".")[0]


def list_keys(name: str) -> tuple[str, ...]:
    """The keys of nested dicts under which plain torch gives a tensor: `optimizer`, `exp_avg`, its FQN."""
    return tuple(name.split(".", 2 if kind_of(name) == "optimizer" else 1))


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
