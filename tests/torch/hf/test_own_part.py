"""A tensor of transformers that ranks share out by rows holds parameters that a checkpoint has by themselves."""

import pytest
import torch

from plait.hf.directory.source import derive_part_shape, take_own_part, take_part
from plait.hf.stored import Stored
from plait.sharding import Interval, build_split

STORED = {
    "part of the columns, transposed": Stored("c_attn", (6, 15), 1, Interval(5, 10), is_transposed=True),
    "part of the rows": Stored("packed", (15, 6), 0, Interval(4, 10)),
    "transposed": Stored("c_proj", (7, 4), is_transposed=True),
    "part of a bias": Stored("bias", (15,), 0, Interval(10, 15)),
}


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED.keys())
def test_the_parts_of_all_ranks_are_the_parameter_once(stored: Stored, degree: int) -> None:
    whole = torch.arange(1.0, 1 + torch.Size(stored.shape).numel()).view(stored.shape)
    found = torch.zeros(derive_part_shape(stored))
    for rows in build_split(stored.shape[0], degree).intervals:
        own = (rows, *(Interval(0, size) for size in stored.shape[1:]))
        intervals, part = take_own_part(whole[rows.start : rows.stop], own, stored)
        assert tuple(part.shape) == tuple(map(len, intervals))
        found[tuple(slice(each.start, each.stop) for each in intervals)] += part
    assert torch.equal(found, take_part(whole, stored))
