"""What a safetensors file holds under a name."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch

DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.float64: "F64",
    torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
"""Names in the header of a file, in the order of the library, which puts the last first."""

_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorSpec(NamedTuple):
    """What a file holds under a name."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


def sort_names(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names in the order of their tensors in a file, which is the library's: by dtype, then by name."""
    return sorted(specs, key=lambda name: (-_RANKS[specs[name].dtype], name.encode()))
