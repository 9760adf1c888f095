"""The index of a checkpoint: what is in which file, and where the run was."""

import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

from plait.checkpoint.names import INDEX, file_name
from plait.errors import CheckpointError
from plait.sharding import Interval, Ownership

FORMAT = 1


@dataclass(frozen=True)
class Piece:
    """Part of a tensor: the file it is in and the interval of every dim that it covers."""

    file: str
    intervals: tuple[Interval, ...]

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return prod(map(len, self.intervals))


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the run, whole, and its pieces: every element is in exactly one."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """All tensors by name, the bytes of every file, and the state of the run (position, config, seed)."""

    step: int
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, int]
    state: Mapping[str, Any]

    def to_json(self) -> str:
        """Text of `index.json`; an interval is `[start, stop]`."""
        tensors = {
            name: asdict(record) | {"pieces": [[piece.file, _edges(piece)] for piece in record.pieces]}
            for name, record in self.tensors.items()
        }
        body = {"format": FORMAT, "step": self.step, "state": self.state, "files": self.files, "tensors": tensors}
        return json.dumps(body, indent=1)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read the index of `folder` and check that it is whole: every element covered, every file with its bytes.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such checkpoint folder")
        try:
            index = cls._from_json((folder / INDEX).read_text(encoding="utf-8"), folder)
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: has no {INDEX}, so it is not a checkpoint", hint=_HINT) from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            message = f"{folder / INDEX}: cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(message, hint=_HINT) from error
        problems = [*index._find_bad_files(folder), *index._find_uncovered()]
        if problems:
            raise CheckpointError(f"{folder}: is damaged: {'; '.join(problems[:5])}", hint=_HINT)
        return index

    @classmethod
    def _from_json(cls, text: str, folder: Path) -> Self:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise CheckpointError(f"{folder}: has format {body['format']}, and this version reads format {FORMAT}")
        tensors = {
            name: TensorRecord(
                tuple(map(operator.index, record["shape"])),
                record["dtype"],
                tuple(Piece(file, tuple(Interval(*edge) for edge in edges)) for file, edges in record["pieces"]),
            )
            for name, record in body["tensors"].items()
        }
        return cls(int(body["step"]), tensors, body["files"], body["state"])

    def _find_bad_files(self, folder: Path) -> list[str]:
        problems = []
        for name, size_bytes in self.files.items():
            path = folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != size_bytes:
                problems.append(f"{name} has {path.stat().st_size} bytes of {size_bytes}")
        return problems

    def _find_uncovered(self) -> list[str]:
        return [
            f"{name} {list(record.shape)} has {covered} of {prod(record.shape)} elements"
            for name, record in self.tensors.items()
            if (covered := sum(piece.numel for piece in record.pieces)) != prod(record.shape)
        ]


_HINT = "delete the folder to go on from the checkpoint before it"


def _edges(piece: Piece) -> list[list[int]]:
    return [[interval.start, interval.stop] for interval in piece.intervals]


def list_pieces(ownership: Ownership, degree: int) -> tuple[Piece, ...]:
    """Who writes what of a tensor at this tp degree: the rank that counts an element writes it."""
    return tuple(
        piece
        for rank in range(degree)
        if ownership.is_counted_on(rank)
        if (piece := Piece(file_name(rank, degree), ownership.intervals(rank))).numel
    )
