"""Every collective on every layout in memory equals its definition, bit for bit, on small integers.

FIELD 3.4: `dist.all_reduce(x.contiguous()); return x` gave every rank its own addend back when x was not contiguous.
"""

from dataclasses import replace
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.contract.collective import Collective
from plait.sharding import Interval, Kind, MeshShape, Split, build_head_splits, build_split

STRIDES = ("contiguous", "transposed", "every_second", "expanded", "offset", "reversed_dims")
LENGTHS = (7, 5, 1, 0, 8)
"""Uneven over 2, 3 and 4 ranks, fewer than ranks, nothing, and even over 2 and 4."""


def build_values(shape: tuple[int, ...], rank: int, strides: str) -> Tensor:
    """Integers that differ by rank and position, laid out in memory in one of many ways."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    values = torch.randint(-9, 10, shape, generator=generator).float()
    match strides:
        case "transposed":
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        case "every_second":
            return values.repeat_interleave(2, dim=-1)[..., ::2]
        case "expanded":
            return values[:1].expand(shape)
        case "offset":
            return torch.cat([values.new_zeros(1, *shape[1:]), values])[1:]
        case "reversed_dims":
            return values.permute(*range(len(shape))[::-1]).contiguous().permute(*range(len(shape))[::-1])
        case _:
            return values


def take(x: Tensor, dim: int, split: Split, rank: int) -> Tensor:
    return x.narrow(dim, split.intervals[rank].start, split.lengths[rank])


def run_all(shape: tuple[int, ...], dim: int, other: int, strides: str) -> None:
    """Compare each collective of this rank with its definition, which every rank can compute for itself."""
    degree = torch.distributed.get_world_size()
    axis = build_mesh(MeshShape(tp=degree)).tp
    split, other_split = build_split(shape[dim], degree), build_split(shape[other], degree)
    addends = [build_values(shape, rank, strides) for rank in range(degree)]
    full, own = addends[0], addends[axis.rank]
    shard = take(full, dim, split, axis.rank)
    before = own.clone(), shard.clone()

    total = reduce(torch.add, addends)
    expect(collectives.all_reduce(own, axis), total)
    expect(collectives.all_reduce(own, axis, op="max"), reduce(torch.maximum, addends))
    expect(collectives.all_gather(shard, axis, split, dim=dim), full)
    expect(collectives.reduce_scatter(own, axis, split, dim=dim), take(total, dim, split, axis.rank))
    expect(collectives.take_own(full, axis, split, dim=dim), shard)
    if other != dim:
        swapped = collectives.all_to_all(shard, axis, gather=(dim, split), scatter=(other, other_split))
        expect(swapped, take(full, other, other_split, axis.rank))
    assert torch.equal(own, before[0])
    assert torch.equal(shard, before[1])


def expect(result: Tensor, expected: Tensor) -> None:
    assert result.is_contiguous()
    assert torch.equal(result, expected), (result, expected)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    strides=st.sampled_from(STRIDES),
    data=st.data(),
)
def test_any_shape_dim_and_strides(ranks, world_size, shape, strides, data):
    """FIELD 3.4, 3.25: strided, transposed, expanded, empty inputs and uneven splits."""
    dim, other = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    ranks(world_size).call(run_all, shape=shape, dim=dim, other=other, strides=strides)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_uneven_lengths_on_every_dim(ranks, world_size, length, dim):
    """FIELD 3.25: 7 tokens over 2 ranks are 4 and 3, never 8 rows."""
    shape = tuple(length if index == dim else 6 for index in range(3))
    ranks(world_size).call(run_all, shape=shape, dim=dim, other=(dim + 1) % 3, strides="transposed")


def gather_dtypes() -> list[str]:
    axis = build_mesh(MeshShape(tp=2)).tp
    carried = []
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool):
        full = (torch.arange(7) % 2).to(dtype)
        split = build_split(7, 2)
        shard = take(full, 0, split, axis.rank)
        assert torch.equal(collectives.all_gather(shard, axis, split), full)
        if dtype is not torch.bool:
            assert torch.equal(collectives.all_reduce(full, axis), full + full)
        carried.append(str(dtype))
    return carried


def test_every_dtype_that_plait_sends(ranks):
    assert ranks(2).call(gather_dtypes)[0][-1] == "torch.bool"


def gather_shared_heads() -> tuple[Tensor, Tensor]:
    axis = build_mesh(MeshShape(tp=3)).tp
    split = build_head_splits(6, 2, 2, 3).kv
    assert split.lengths == (2, 2, 2)
    full = torch.arange(8.0).view(2, 4)
    shard = take(full, 1, split, axis.rank)
    return collectives.all_gather(shard, axis, split, dim=1), collectives.reduce_scatter(full, axis, split, dim=1)


def test_an_interval_held_by_several_ranks_is_gathered_once_and_scattered_to_each(ranks):
    full = torch.arange(8.0).view(2, 4)
    results = ranks(3).call(gather_shared_heads)
    for rank, (gathered, scattered) in enumerate(results):
        assert torch.equal(gathered, full)
        assert torch.equal(scattered, 3 * full[:, slice(0, 2) if rank < 2 else slice(2, 4)])


def gather_ragged(lengths: tuple[int, ...]) -> Tensor:
    axis = build_mesh(MeshShape(tp=len(lengths))).tp
    edges = [0, *(sum(lengths[: rank + 1]) for rank in range(len(lengths)))]
    split = Split(edges[-1], tuple(Interval(start, stop) for start, stop in pairwise(edges)))
    return collectives.all_gather(torch.full((lengths[axis.rank],), float(axis.rank)), axis, split)


@pytest.mark.parametrize("lengths", [(0, 3), (5, 1), (1, 0, 4), (0, 0, 2)])
def test_any_split_is_gathered_not_only_balanced_ones(ranks, lengths):
    expected = torch.cat([torch.full((length,), float(rank)) for rank, length in enumerate(lengths)])
    assert all(torch.equal(full, expected) for full in ranks(len(lengths)).call(gather_ragged, lengths=lengths))


def sum_in(
    own_dtype: torch.dtype, reduce_dtype: torch.dtype | None, dtype: torch.dtype | None
) -> tuple[list[float], list[Collective]]:
    axis = replace(build_mesh(MeshShape(tp=2)).tp, reduce_dtype=reduce_dtype)
    own = torch.full((2,), 257.0, dtype=own_dtype)
    with record() as trace:
        total = collectives.all_reduce(own, axis, dtype=dtype)
        shard = collectives.reduce_scatter(own, axis, build_split(2, 2), dtype=dtype)
        counts = collectives.all_reduce(torch.ones(2, dtype=torch.int64), axis)
        most = collectives.all_reduce(own, axis, op="max")
    assert (total.dtype, shard.dtype, counts.dtype, most.dtype) == (own_dtype, own_dtype, torch.int64, own_dtype)
    assert torch.equal(most, own)
    return [*total.tolist(), *shard.tolist()], trace.collectives


@pytest.mark.parametrize(
    ("own_dtype", "reduce_dtype", "dtype", "carrier", "total"),
    [
        (torch.float32, None, None, "float32", 514.0),
        (torch.float32, torch.bfloat16, None, "bfloat16", 512.0),
        (torch.float32, torch.bfloat16, torch.float32, "float32", 514.0),
        (torch.float32, torch.float32, torch.bfloat16, "bfloat16", 512.0),
        (torch.bfloat16, torch.float32, None, "float32", 512.0),
    ],
)
def test_sums_are_carried_in_the_declared_dtype_and_recorded_so(ranks, own_dtype, reduce_dtype, dtype, carrier, total):
    """FIELD 3.18: reductions ran silently in bfloat16 although float32 was asked for. 257 has no bfloat16."""
    results = ranks(2).call(sum_in, own_dtype=own_dtype, reduce_dtype=reduce_dtype, dtype=dtype)
    for totals, recorded in results:
        assert set(totals) == {total}
        own_name = str(own_dtype).removeprefix("torch.")
        assert [entry.dtype for entry in recorded] == [carrier, carrier, "int64", own_name]


def sum_reals() -> list[Tensor]:
    axis = build_mesh(MeshShape(tp=4)).tp
    own = torch.randn(1000, generator=torch.Generator().manual_seed(axis.rank))
    split = build_split(1000, 4)
    shards = [collectives.reduce_scatter(own, axis, split) for _ in range(2)]
    return [
        *(collectives.all_reduce(own, axis) for _ in range(2)),
        *(collectives.all_gather(s, axis, split) for s in shards),
    ]


def test_sums_of_reals_are_the_same_bits_on_every_rank_and_every_time(ranks):
    first, *others = ranks(4).call(sum_reals)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def issue_each() -> list[Collective]:
    axis = build_mesh(MeshShape(tp=2)).tp
    x, split = torch.ones(7, 4), build_split(7, 2)
    shard = take(x, 0, split, axis.rank)
    with record() as trace:
        collectives.all_reduce(x, axis, op="max", label="loss")
        collectives.all_gather(shard, axis, split)
        collectives.reduce_scatter(x, axis, build_split(4, 2), dim=1)
        collectives.all_to_all(shard, axis, gather=(0, split), scatter=(1, build_split(4, 2)))
        collectives.take_own(x, axis, split)
    assert trace.labels == ["loss", "", "", ""]
    return trace.collectives


def test_the_record_has_the_whole_shape_also_where_the_split_is_uneven(ranks):
    expected = [
        Collective(Kind.ALL_REDUCE, "tp", 2, (7, 4), "float32", op="max"),
        Collective(Kind.ALL_GATHER, "tp", 2, (7, 4), "float32"),
        Collective(Kind.REDUCE_SCATTER, "tp", 2, (7, 4), "float32", dim=1),
        Collective(Kind.ALL_TO_ALL, "tp", 2, (7, 4), "float32", dim=1),
    ]
    assert ranks(2).call(issue_each) == [expected, expected]
