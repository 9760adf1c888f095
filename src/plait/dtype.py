"""Number formats by name, without torch."""

from typing import Literal, get_args

DType = Literal["float64", "float32", "bfloat16", "float16", "int64", "uint8", "bool"]

_WIDTH_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}

assert set(_WIDTH_BYTES) == set(get_args(DType)), (_WIDTH_BYTES, get_args(DType))


def width_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    return _WIDTH_BYTES[dtype]
