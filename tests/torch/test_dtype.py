"""The number formats that the symbolic half knows by name are torch's."""

from typing import get_args

import pytest
import torch

from plait.dtype import DType, width_bytes


@pytest.mark.parametrize("name", get_args(DType))
def test_an_element_has_the_bytes_that_torch_gives_it(name: str) -> None:
    assert width_bytes(name) == getattr(torch, name).itemsize
