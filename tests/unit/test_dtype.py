import pytest

from plait.dtype import width_bytes


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("int64", 8), ("bool", 1)],
)
def test_widths_are_bytes(dtype: str, width: int) -> None:
    assert width_bytes(dtype) == width
