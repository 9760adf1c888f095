"""The index of a checkpoint: where the run was, and by which sum each file is known."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from plait.checkpoint.names import INDEX, METADATA
from plait.errors import CheckpointError

FORMAT = 2
"""Format 1 kept tensors in safetensors files, a file for each tp rank."""

_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class FileSum:
    """By what a file is known: its length, and a CRC-32 of its bytes, which finds what disks and copies do to it."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class Index:
    """The state of the run (position, config, seed) and every other file of the checkpoint."""

    step: int
    state: Mapping[str, Any]
    files: Mapping[str, FileSum]

    def to_json(self) -> str:
        """Text of `index.json`, which holds its own sum as well."""
        files = {name: asdict(each) for name, each in self.files.items()}
        written = {"format": FORMAT, "step": self.step, "state": self.state, "files": files}
        body: dict[str, Any] = json.loads(json.dumps(written))
        return json.dumps(body | {"crc32": _sum_body(body)}, indent=1)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read the index of `folder`, and check that every file is there with its length.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged, partial or foreign.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such checkpoint folder")
        try:
            index = cls._from_json((folder / INDEX).read_text(encoding="utf-8"), folder)
        except FileNotFoundError:
            raise CheckpointError(_describe_foreign(folder), hint=HINT) from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            message = f"{folder / INDEX}: cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(message, hint=HINT) from error
        _raise_damaged(folder, [problem for name in index.files if (problem := index._find_misfit(folder, name))])
        return index

    @classmethod
    def _from_json(cls, text: str, folder: Path) -> Self:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{folder}: has format {body['format']}, and this version reads format {FORMAT}",
                hint="go on with the version that wrote it, or let that one convert it to safetensors (plait convert)",
            )
        if body.pop("crc32") != _sum_body(body):
            raise ValueError("its text is not what was written")
        files = {name: FileSum(**fields) for name, fields in body["files"].items()}
        return cls(int(body["step"]), body["state"], files)

    def check_files(self, folder: Path, names: Iterable[str]) -> None:
        """Check that files hold what was written, which reads all of them.

        Raises:
            CheckpointError: one does not; it is named.
        """
        problems = []
        for name in names:
            problem = self._find_misfit(folder, name)
            if problem is None and sum_file(folder / name) != self.files[name]:
                problem = f"{name} does not hold what was written"
            problems += [problem] if problem else []
        _raise_damaged(folder, problems)

    def check_listed(self, folder: Path, names: Iterable[str]) -> None:
        """Check that these files are among those whose sums were written.

        Raises:
            CheckpointError: one is not; it is named.
        """
        unknown = sorted(set(names) - self.files.keys())
        _raise_damaged(folder, [f"{name} has no sum in {INDEX}" for name in unknown])

    def _find_misfit(self, folder: Path, name: str) -> str | None:
        path, expected = folder / name, self.files[name].size_bytes
        if not path.is_file():
            return f"{name} is missing"
        found = path.stat().st_size
        return None if found == expected else f"{name} has {found} bytes of {expected}"


HINT = 'delete the folder, or set train.resume = "last_good", to go on from the checkpoint before it'


def sum_file(path: Path) -> FileSum:
    """Read a file and sum it up.

    Raises:
        CheckpointError: it cannot be read.
    """
    size_bytes = value = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                size_bytes, value = size_bytes + len(chunk), crc32(chunk, value)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", hint=HINT) from error
    return FileSum(size_bytes, value)


def _sum_body(body: Mapping[str, Any]) -> int:
    return crc32(json.dumps(body, sort_keys=True).encode())


def _describe_foreign(folder: Path) -> str:
    if (folder / METADATA).is_file():
        return f"{folder}: has no {INDEX}, only the {METADATA} of torch, so it is not a checkpoint of plait"
    return f"{folder}: has no {INDEX}, so it is not a checkpoint"


def _raise_damaged(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{folder}: is damaged: {'; '.join(problems[:5])}", hint=HINT)
