"""Collectives in shared memory: each equals its definition bit for bit, whatever came before and whoever is slow."""

import ctypes
import gc
import os
import random
import re
import time
from dataclasses import replace
from functools import reduce
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
from torch import Tensor

from plait.comm import collectives
from plait.comm.launch import LocalRanks
from plait.comm.mesh import Axis, build_mesh
from plait.comm.shared import arena
from plait.comm.trace import record
from plait.errors import TransportError, TransportTimeout
from plait.sharding import Kind, MeshShape, Split, build_head_splits, build_split
from tests.support.file_limit import limited

SHAPES = ((1,), (7, 5), (0, 3), (4, 1, 6), (33, 64), (2, 3, 4), (130, 70), (64, 256), (5,))
"""Small and large in turn, uneven, empty; the memory grows in between."""

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.uint8)


def build_axis(**reduce_dtype: torch.dtype) -> Axis:
    degree = torch.distributed.get_world_size()
    axis = build_mesh(MeshShape(tp=degree), shared_memory=True, **reduce_dtype).tp
    assert axis.shared is not None, axis.unshared_because
    # Nothing below may fall back on it.
    return replace(axis, group=None)


def draw(shape: tuple[int, ...], dtype: torch.dtype, step: int, rank: int) -> Tensor:
    """Integers so small that their sums are exact in each dtype, with strides that are not their shape's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randint(0, 6, (*shape, 2), generator=generator).to(dtype)
    return values[..., 1].transpose(0, -1).contiguous().transpose(0, -1) if step % 2 else values[..., 0]


def take(x: Tensor, dim: int, split: Split, rank: int) -> Tensor:
    return x.narrow(dim, split.intervals[rank].start, split.lengths[rank])


def run_in_turn(num_steps: int, longest_pause_s: float) -> int:
    """Collectives of all kinds, shapes and dtypes in turn; how many elements were compared."""
    axis = build_axis()
    drawn, paused = random.Random(7), random.Random(axis.rank)
    compared = 0
    for step in range(num_steps):
        shape, dtype, kind = drawn.choice(SHAPES), drawn.choice(DTYPES), drawn.randrange(5)
        dim = drawn.randrange(len(shape))
        other = (dim + 1) % len(shape)
        split, other_split = build_split(shape[dim], axis.degree), build_split(shape[other], axis.degree)
        addends = [draw(shape, dtype, step, rank) for rank in range(axis.degree)]
        total, full, own = reduce(torch.add, addends), addends[0], addends[axis.rank]
        time.sleep(paused.random() ** 4 * longest_pause_s)
        shard = take(full, dim, split, axis.rank)
        if kind == 0:
            result, expected = collectives.all_reduce(own, axis), total
        elif kind == 1:
            result, expected = collectives.all_reduce(own, axis, op="max"), reduce(torch.maximum, addends)
        elif kind == 2:
            result = collectives.reduce_scatter(own, axis, split, dim=dim)
            expected = take(total, dim, split, axis.rank)
        elif kind == 3 or other == dim:
            result, expected = collectives.all_gather(shard, axis, split, dim=dim), full
        else:
            result = collectives.all_to_all(shard, axis, gather=(dim, split), scatter=(other, other_split))
            expected = take(full, other, other_split, axis.rank)
        assert result.is_contiguous()
        assert torch.equal(result, expected), (step, kind, shape, dim, dtype)
        compared += result.numel()
    return compared


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_in_any_order_equal_their_definitions(ranks, world_size: int) -> None:
    assert min(ranks(world_size).call(run_in_turn, num_steps=400, longest_pause_s=0.0)) > 10_000


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_rank_overwrites_what_a_slow_one_still_reads(ranks, world_size: int) -> None:
    assert min(ranks(world_size).call(run_in_turn, num_steps=150, longest_pause_s=0.02)) > 10_000


def wait_for_a_late_rank() -> float:
    axis, waited_s = build_axis(), []
    for _ in range(8):
        torch.distributed.barrier()
        time.sleep(0.05 * axis.rank)
        start = time.monotonic()
        collectives.all_reduce(torch.ones(1), axis)
        waited_s.append(time.monotonic() - start)
    return min(waited_s)


def test_who_sleeps_is_woken(ranks) -> None:
    """Nobody sleeps for longer than 0.2 s, so without that everything would only be slow."""
    waited_s, _ = ranks(2).call(wait_for_a_late_rank)
    assert waited_s < 0.15


def add_up_reals(carrier: torch.dtype | None) -> None:
    axis = build_axis(reduce_dtype=carrier)
    dtype = carrier or torch.float32
    addends = [torch.randn(50, 300, generator=torch.Generator().manual_seed(rank)) for rank in range(axis.degree)]
    expected = reduce(torch.add, [addend.to(dtype) for addend in addends]).float()
    split = build_split(50, axis.degree)
    assert torch.equal(collectives.all_reduce(addends[axis.rank], axis), expected)
    assert torch.equal(collectives.all_reduce(addends[axis.rank][:2], axis), expected[:2])
    own = collectives.reduce_scatter(addends[axis.rank], axis, split)
    assert torch.equal(own, take(expected, 0, split, axis.rank))


@pytest.mark.parametrize("carrier", [None, torch.bfloat16, torch.float64])
def test_sums_are_taken_in_rank_order_in_the_dtype_that_carries_them(ranks, carrier) -> None:
    """In another order, or rounded at another time, the sum of four numbers has other bits."""
    ranks(4).call(add_up_reals, carrier=carrier)


def reduce_in_and_out_of_inference_mode() -> None:
    axis = build_axis()
    for is_inference in (True, False):
        with torch.inference_mode(is_inference):
            assert collectives.all_reduce(torch.ones(3), axis).tolist() == [2.0] * 3


def test_memory_that_is_first_used_in_inference_mode_serves_outside_it(ranks) -> None:
    ranks(2).call(reduce_in_and_out_of_inference_mode)


def gather_shared_heads() -> None:
    axis = build_axis()
    split = build_head_splits(4, 2, 3, axis.degree).kv
    assert split.is_replicated
    full = torch.arange(12.0).view(2, 6)
    shard = take(full, 1, split, axis.rank) + axis.rank % 2
    assert torch.equal(collectives.all_gather(shard, axis, split, dim=1), full)
    own = collectives.reduce_scatter(full + axis.rank, axis, split, dim=1)
    assert torch.equal(own, take(4 * full + 6, 1, split, axis.rank))


def test_what_several_ranks_hold_is_taken_from_the_first_of_them(ranks) -> None:
    ranks(4).call(gather_shared_heads)


def run_on_two_meshes() -> None:
    meshes = [build_mesh(MeshShape(dp_replicate=2, tp=2), shared_memory=True) for _ in range(2)]
    rank = meshes[0].rank
    value = torch.tensor(10.0**rank)
    for mesh in (*meshes, *meshes):
        group = mesh.build_subgroup("kv", ((0, 1),))
        assert None not in (mesh.dp.shared, mesh.tp.shared, group.shared)
        with record() as trace:
            assert collectives.all_reduce(value, mesh.tp).item() == (11 if rank < 2 else 1100)
            assert collectives.all_reduce(value, mesh.dp).item() == (101 if rank % 2 == 0 else 1010)
            assert collectives.all_reduce(value, group).item() == (11 if rank < 2 else 1100)
        assert [(each.kind, each.axis) for each in trace.collectives] == [
            (Kind.ALL_REDUCE, axis) for axis in ("tp", "dp", "kv")
        ]


def test_axes_and_meshes_do_not_disturb_each_other(ranks) -> None:
    ranks(4).call(run_on_two_meshes)


def list_mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/plait-" in line]


def use_and_drop() -> tuple[int, int, list[object]]:
    axis = build_axis()
    for size in (6_000_000, 10_000_000, 10):
        kept = collectives.all_reduce(torch.ones(size), axis)
        assert kept.eq(axis.degree).all()
    held_bytes = sum({stat.st_ino: stat.st_blocks * 512 for stat in map(os.fstat, list_open())}.values())
    mapped = len(list_mapped())
    gc.disable()
    del axis
    left = list_mapped() + list_open()
    gc.enable()
    return mapped, held_bytes, left


def list_open() -> list[int]:
    files = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    return [file for file in files if read_name(file).startswith("/dev/shm/plait-")]


def read_name(file: int) -> str:
    path = Path(f"/proc/self/fd/{file}")
    return str(path.readlink()) if path.is_symlink() else ""


def list_left(pids: list[int]) -> list[Path]:
    return [path for pid in pids for path in arena.FOLDER.glob(f"plait-{pid}-*")]


def test_memory_has_no_name_goes_when_it_is_outgrown_and_with_its_axis(ranks) -> None:
    for mapped, held_bytes, left in ranks(2).call(use_and_drop):
        assert mapped >= 2
        # Two halves of two tensors of 40 MB, a quarter more at most.
        assert 160e6 <= held_bytes <= 201e6
        assert left == []
    assert list_left(ranks(2).call(os.getpid)) == []


def look_for_memory(folder: str) -> str:
    before, arena.FOLDER = arena.FOLDER, Path(folder)
    try:
        mesh = build_mesh(MeshShape(tp=torch.distributed.get_world_size()), shared_memory=True)
    finally:
        arena.FOLDER = before
    assert mesh.tp.shared is None
    assert collectives.all_reduce(torch.ones(1), mesh.tp).item() == mesh.tp.degree
    return mesh.tp.unshared_because


def test_without_memory_the_library_moves_and_all_ranks_say_why(ranks) -> None:
    reasons = ranks(2).call(look_for_memory, folder="/nowhere")
    assert reasons[0] == reasons[1]
    assert re.fullmatch("rank 0: there is no /nowhere/plait-.*", reasons[0])


def look_on_another_host() -> str | None:
    """A host of one's own, as far as /dev/shm is concerned; None where this user may not have one."""
    libc = ctypes.CDLL(None)
    new_namespace, private, nothing = 0x20000, ctypes.c_ulong((1 << 14) | (1 << 18)), ctypes.c_ulong(0)
    if libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, private, None):
        return None
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", nothing, None) == 0
    mesh = build_mesh(MeshShape(tp=2), shared_memory=True)
    assert mesh.tp.shared is None
    assert list(arena.FOLDER.iterdir()) == []
    return mesh.tp.unshared_because


def test_ranks_of_two_hosts_find_out() -> None:
    with LocalRanks(2, timeout_s=20, device_type="cpu") as ranks:
        reasons = ranks.call(look_on_another_host)
    if None in reasons:
        pytest.skip("it takes the right to mount")
    assert reasons[0] == reasons[1]
    assert re.match("rank 1: it does not see the memory of the first rank, so it is on another host", reasons[0])


def run_out_of_memory() -> str | None:
    axis = build_mesh(MeshShape(tp=3), shared_memory=True).tp
    assert axis.shared is not None
    full = torch.arange(1_000_000.0).view(1000, 1000)
    split, total = build_split(1000, 3), 3 * full
    own = take(full, 0, split, axis.rank)
    with limited(4_000_000):
        for rows in (100, 1000, 100):
            assert torch.equal(collectives.all_reduce(full[:rows], axis), total[:rows])
        assert torch.equal(collectives.reduce_scatter(full, axis, split), take(total, 0, split, axis.rank))
        assert torch.equal(collectives.all_gather(own, axis, split), full)
        swapped = collectives.all_to_all(own, axis, gather=(0, split), scatter=(1, split))
        assert torch.equal(swapped, take(full, 1, split, axis.rank))
        assert torch.equal(collectives.all_reduce(full[:7], axis), total[:7])
    return axis.shared.collectives.lack


def test_what_there_is_no_memory_for_goes_through_the_library(ranks) -> None:
    for lack in ranks(3).call(run_out_of_memory):
        assert lack is not None
        assert re.fullmatch(r"8.39 MB of shared memory are needed, but /dev/shm has .* of .* left", lack)


def differ(shapes: list[tuple[int, ...]]) -> None:
    axis = build_axis()
    collectives.all_reduce(torch.ones(3), axis)
    collectives.all_reduce(torch.ones(shapes[axis.rank]), axis, label="layers.0")


@pytest.mark.parametrize("shapes", [[(4,), (5,)], [(4,), (1000, 1000)], [(1000, 1000), (4,)]], ids=str)
def test_ranks_that_differ_are_told_how(ranks, shapes) -> None:
    start = time.monotonic()
    with pytest.raises(TransportError, match="ranks issued different collectives") as caught:
        ranks(2).call(differ, shapes=shapes)
    text = f"sum of {list(shapes[0])} torch.float32 \\(layers.0\\) here, but sum of {list(shapes[1])} torch.float32"
    assert re.search(text.replace("[", r"\["), str(caught.value))
    assert time.monotonic() - start < 10


def die_in_the_middle() -> None:
    axis = build_axis()
    for step in range(4):
        if axis.rank == 1 and step == 3:
            os.kill(os.getpid(), SIGKILL)
        collectives.all_reduce(torch.ones(1000), axis)


def test_a_rank_that_is_killed_is_named_by_those_who_wait_for_it() -> None:
    with LocalRanks(3, timeout_s=60, device_type="cpu") as ranks:
        pids, start = ranks.call(os.getpid), time.monotonic()
        with pytest.raises(TransportError, match="rank 1 .*died: killed by SIGKILL") as caught:
            ranks.call(die_in_the_middle)
        assert time.monotonic() - start < 8
    assert "#4 on tp: all_reduce [1000] float32 over tp failed: rank 1 has died" in str(caught.value)
    assert list_left(pids) == []


def stay_away() -> None:
    axis = build_axis()
    if axis.rank != 1:
        collectives.all_reduce(torch.ones(1000), axis)
    time.sleep(4)


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    with LocalRanks(2, timeout_s=2, device_type="cpu") as ranks, pytest.raises(TransportTimeout) as caught:
        ranks.call(stay_away)
    assert "timed out, rank 1 did not do its part within 2 s" in str(caught.value)
