"""The weights of a Hugging Face directory: which tensors its safetensors files hold, and pieces of them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self

from torch import Tensor

from plait.checkpoint.safetensors import PieceReader
from plait.checkpoint.shards import SINGLE_FILE, WEIGHT_INDEX
from plait.checkpoint.spec import TensorSpec
from plait.errors import CheckpointError
from plait.sharding import Interval


class Entry(NamedTuple):
    """Where a tensor is, and what it is."""

    file: str
    spec: TensorSpec


@dataclass(frozen=True)
class WeightFiles:
    """Every tensor of a directory by its name; nothing is read before a piece of it is asked for."""

    folder: Path
    entries: Mapping[str, Entry]
    reader: PieceReader

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read the headers of all files, of which each must be as long as its header says.

        Raises:
            CheckpointError: there are no weights, or a file is missing, truncated, or not what the index says.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such directory")
        reader = PieceReader(folder)
        if (folder / SINGLE_FILE).is_file():
            held = {SINGLE_FILE: reader.list_tensors(SINGLE_FILE)}
        elif (folder / WEIGHT_INDEX).is_file():
            held = _read_indexed(folder, reader)
        else:
            raise _build_absence(folder)
        entries = {name: Entry(file, spec) for file, specs in held.items() for name, spec in specs.items()}
        return cls(folder, entries, reader)

    def read(self, name: str, intervals: tuple[Interval, ...]) -> Tensor:
        """One piece of a tensor, an interval for every dim; a view of the file where that is mapped into memory.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return self.reader.read(self.entries[name].file, name, intervals)


def derive_fingerprint(folder: Path, sampled_bytes: int = 1 << 16) -> str:
    """A digest of all headers and of both ends of each file, for telling the weights of one directory from another's.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
    """
    files = WeightFiles.from_folder(folder)
    digest = blake2b(repr(sorted(files.entries.items())).encode(), digest_size=8)
    for name in sorted({entry.file for entry in files.entries.values()}):
        with (folder / name).open("rb") as file:
            digest.update(file.read(sampled_bytes))
            file.seek(-min(sampled_bytes, (folder / name).stat().st_size), 2)
            digest.update(file.read())
    return digest.hexdigest()


def _read_indexed(folder: Path, reader: PieceReader) -> dict[str, dict[str, TensorSpec]]:
    weight_map = _load_weight_map(folder / WEIGHT_INDEX)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: {_list(absent)} missing, which {WEIGHT_INDEX} names",
            hint="copy or download the directory again",
        )
    held = {file: reader.list_tensors(file) for file in files}
    lost = [name for name, file in weight_map.items() if name not in held[file]]
    if lost:
        raise CheckpointError(
            f"{folder}: {_list(lost)} not in the file that {WEIGHT_INDEX} says",
            hint="copy or download the directory again",
        )
    return {file: {name: spec for name, spec in held[file].items() if weight_map.get(name) == file} for file in held}


def _load_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(value, str) and Path(value).name == value for value in weight_map.values()):
            raise ValueError("weight_map names files outside the directory")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
    return dict(weight_map)


def _build_absence(folder: Path) -> CheckpointError:
    message = f"{folder}: has no weights: there is neither {SINGLE_FILE} nor {WEIGHT_INDEX}"
    for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf"):
        found = next(iter(sorted(folder.glob(pattern))), None)
        if found is not None:
            hint = f"{found.name} is not read: load it with transformers and save it once with save_pretrained"
            return CheckpointError(message, hint=hint)
    return CheckpointError(message, hint="give the directory of a model in safetensors format")


def _list(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return f"{', '.join(listed[:5])}{more} {'is' if len(listed) == 1 else 'are'}"
