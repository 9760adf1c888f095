"""Reading checkpoints of torch.distributed.checkpoint: any piece of any tensor, whoever wrote it."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from plait.checkpoint.index import HINT, Index
from plait.checkpoint.names import METADATA, kind_of
from plait.checkpoint.part import Owned, Tensors
from plait.checkpoint.spec import TensorSpec
from plait.errors import CheckpointError
from plait.sharding import Interval

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = frozenset(
    [
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *((_METADATA, f"{name}Metadata") for name in ("TensorStorage", "BytesStorage", "ChunkStorage")),
        (_METADATA, "TensorProperties"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    ]
)
"""Module and name of all that metadata is made of, dtypes and paths aside."""

_PATHS = {
    (module, f"{system}Path"): kind
    for module in ("pathlib", "pathlib._local")
    for system, kind in (("Posix", PurePosixPath), ("Windows", PureWindowsPath))
}
"""What stands for a path in it, where the folder was when it was written, by whatever Python on whatever system."""

_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, EOFError, pickle.UnpicklingError,
)  # fmt: skip
"""What unpickling raises."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose index and metadata have been read; no tensor has."""

    folder: Path
    index: Index
    metadata: Metadata

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Open it, and check that every file is there with its length.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged, partial or foreign.
        """
        index = Index.from_folder(folder)
        index.check_listed(folder, [METADATA])
        index.check_files(folder, [METADATA])
        metadata = _load_metadata(folder / METADATA)
        index.check_listed(folder, {place.relative_path for place in metadata.storage_data.values()})
        return cls(folder, index, metadata)

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        held = self.metadata.state_dict_metadata
        return {name for name, record in held.items() if isinstance(record, TensorStorageMetadata)}

    def spec(self, name: str) -> TensorSpec:
        """Dtype and global shape."""
        record = self._record(name)
        return TensorSpec(record.properties.dtype, tuple(record.size))

    def list_pieces(self, name: str) -> list[tuple[Interval, ...]]:
        """Which intervals of a tensor are written together."""
        return [
            tuple(Interval(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            for chunk in self._record(name).chunks
        ]

    @torch.no_grad()
    def read_into(self, tensors: Tensors) -> None:
        """Fill `tensors` with what they are to hold, in their own dtypes.

        Raises:
            CheckpointError: a file cannot be read.
        """
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        plan = create_default_local_load_plan(dict(tensors), self.metadata)
        try:
            reader.read_data(plan, _Targets(tensors)).wait()
        except (OSError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError) as error:
            message = f"{self.folder}: cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(message, hint=HINT) from error

    def read_piece(self, target: Tensor, name: str, intervals: tuple[Interval, ...]) -> None:
        """Fill `target` with an interval for every dim."""
        self.read_into({name: Owned(self.spec(name).shape, intervals, target, is_written=False)})

    def _record(self, name: str) -> TensorStorageMetadata:
        record = self.metadata.state_dict_metadata[name]
        assert isinstance(record, TensorStorageMetadata), name
        return record


def check_fits(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint has all tensors of these kinds, and no others, with their shapes.

    Raises:
        CheckpointError: it is of another model; what differs is listed.
    """
    kinds = set(map(kind_of, shapes))
    saved = {name for name in checkpoint.names if kind_of(name) in kinds}
    problems = [
        *(f"{name} is not in it" for name in shapes if name not in saved),
        *(f"{name} is in it, and the model has no such tensor" for name in sorted(saved - shapes.keys())),
        *(
            f"{name} is {list(checkpoint.spec(name).shape)} in it, and {list(shape)} in the model"
            for name, shape in shapes.items()
            if name in saved and checkpoint.spec(name).shape != shape
        ),
    ]
    if problems:
        more = [f"and {len(problems) - 4} more"] if len(problems) > 5 else []
        listed = "".join(f"\n  - {problem}" for problem in [*problems[: 4 if more else 5], *more])
        raise CheckpointError(
            f"{checkpoint.folder}: is a checkpoint of another model{listed}",
            hint="use the model config it was trained with",
        )


class _Targets(DefaultLoadPlanner):
    """Where what is read goes."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The whole of what this rank holds of a tensor."""
        return self._tensors[index.fqn].__get_tensor_shard__(index)


class _MetadataReader(pickle.Unpickler):
    """Reads torch's metadata, and runs nothing else that a file from elsewhere may name."""

    def find_class(self, module: str, name: str) -> Any:
        """The classes that metadata is made of."""
        if (module, name) in _PATHS:
            return _PATHS[module, name]
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _KNOWN or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of metadata")


def _load_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataReader(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds {type(metadata).__name__}")
    except _UNREADABLE as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})", hint=HINT) from error
    return metadata
