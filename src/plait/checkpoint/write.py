"""Files of torch.distributed.checkpoint, written from front to end, one tensor after another.

torch's own writer of such files keeps every tensor of a file until the file is closed, so that a conversion would have
the whole model in memory, and it does not sum up what it writes.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from plait.checkpoint.index import FileSum, Index, sum_file
from plait.checkpoint.names import INDEX, METADATA, STATE, list_keys
from plait.checkpoint.part import build_state_item, build_write_item
from plait.errors import CheckpointError
from plait.sharding import Interval

Resolve = Callable[[WriteItem], Any]
"""What an item is: a tensor, or an object that is pickled; asked for when it is its turn."""


class Part(NamedTuple):
    """What one rank wrote."""

    file: str
    sum: FileSum
    items: list[WriteItem]
    results: list[WriteResult]

    def to_json(self) -> str:
        """Text of the note by which a rank tells the first one of it; to read it runs nothing that it may name."""
        pieces = [_describe_piece(*each) for each in zip(self.items, self.results, strict=True)]
        return json.dumps({"file": self.file, "sum": asdict(self.sum), "pieces": pieces})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What another rank told of."""
        note = json.loads(text)
        items = [_build_item(piece) for piece in note["pieces"]]
        results = [
            _build_result(item, note["file"], *piece["place"])
            for item, piece in zip(items, note["pieces"], strict=True)
        ]
        return cls(note["file"], FileSum(**note["sum"]), items, results)


class SummedFile:
    """A new file, and the sum of what was written to it; left without an error, it is on disk for good."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self.size_bytes = self.crc32 = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        """Write the next bytes."""
        written = self._file.write(data)
        self.crc32 = crc32(data, self.crc32)
        self.size_bytes += written
        return written

    def flush(self) -> None:
        """Hand all of it to the operating system."""
        self._file.flush()


def write_part(folder: Path, file: str, items: Iterable[WriteItem], resolve: Resolve) -> Part:
    """Write one file; of its tensors one at a time is in memory, where `resolve` makes them.

    Raises:
        CheckpointError: the folder cannot be written, or the disk is full.
    """
    written: list[WriteItem] = []
    results: list[WriteResult] = []
    try:
        with SummedFile(folder / file) as stream:
            for item in items:
                start = stream.size_bytes
                torch.save(_compact(resolve(item)), cast("IO[bytes]", stream))
                written.append(item)
                results.append(_build_result(item, file, start, stream.size_bytes - start))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder / file}: cannot be written ({_describe(error)})") from error
    return Part(file, FileSum(stream.size_bytes, stream.crc32), written, results)


def _describe_piece(item: WriteItem, result: WriteResult) -> dict[str, Any]:
    """What was written, and where in the file; of the state of a run there is but one."""
    place = [result.storage_data.offset, result.storage_data.length]
    data = item.tensor_data
    if data is None:
        return {"name": item.index.fqn, "place": place}
    return {
        "name": item.index.fqn,
        "shape": list(data.size),
        "dtype": str(data.properties.dtype).removeprefix("torch."),
        "starts": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
        "place": place,
    }


def _build_item(piece: Mapping[str, Any]) -> WriteItem:
    if piece["name"] == STATE:
        return build_state_item()
    intervals = [Interval(start, start + size) for start, size in zip(piece["starts"], piece["sizes"], strict=True)]
    return build_write_item(piece["name"], piece["shape"], intervals, getattr(torch, piece["dtype"]))


def _build_result(item: WriteItem, file: str, start: int, length: int) -> WriteResult:
    return WriteResult(item.index, length, _StorageInfo(file, start, length))


def write_metadata(folder: Path, step: int, state: Mapping[str, Any], parts: Iterable[Part]) -> None:
    """Write what says where everything is, in torch's file and in ours, after all ranks have written their parts.

    Raises:
        CheckpointError: it cannot be written, or the parts do not hold every tensor once.
    """
    listed = list(parts)
    metadata = _build_metadata(folder, listed)
    try:
        FileSystemWriter(folder).finish(metadata, [part.results for part in listed])
        files = {part.file: part.sum for part in listed} | {METADATA: sum_file(folder / METADATA)}
        (folder / INDEX).write_text(Index(step, state, files).to_json(), encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be written ({_describe(error)})") from error


def _build_metadata(folder: Path, parts: list[Part]) -> Metadata:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        _, metadata = planner.create_global_plan([SavePlan(part.items) for part in parts])
    except ValueError as error:
        raise CheckpointError(f"{folder}: the ranks do not write every tensor once ({error})") from error
    held = metadata.state_dict_metadata
    partial = [  # torch checks it, but not where one rank alone writes
        f"{name} {list(record.size)}"
        for name, record in held.items()
        if isinstance(record, TensorStorageMetadata)
        and sum(prod(chunk.sizes) for chunk in record.chunks) != prod(record.size)
    ]
    if partial:
        raise CheckpointError(f"{folder}: the ranks do not write every tensor once: {', '.join(partial[:5])}")
    metadata.planner_data = {name: list_keys(name) for name in held}
    return metadata


def _compact(value: Any) -> Any:
    """A tensor on the CPU without the rest of the memory that it is a view of, which would be written with it."""
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _describe(error: OSError | RuntimeError) -> str:
    """The operating system's reason, also where torch wraps it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)
