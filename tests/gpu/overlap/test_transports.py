"""Overlapped collective GEMMs on CUDA devices: over NCCL, and by symmetric memory, against the dense linear.

A machine with fewer than two CUDA devices skips them and says so.
"""

import re
from collections.abc import Iterator

import pytest
import torch

from plait.comm import trace
from plait.comm.launch import LocalRanks
from plait.comm.mesh import Axis, build_mesh
from plait.overlap.transport.library import LibraryTransport
from plait.overlap.transport.ring import RingTransport
from plait.overlap.transport.symm_mem import all_gather_matmul, matmul_reduce_scatter, why_not
from plait.schedule.step import Method
from plait.sharding import MeshShape
from tests.support.collective_gemm import Case, list_runs, run_case

NUM_DEVICES = torch.cuda.device_count()
TIMEOUT_S = 120.0
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""Sums of the small integers of these tests are exact in each."""


@pytest.fixture(scope="module", params=[2, 4])
def devices(request: pytest.FixtureRequest) -> Iterator[LocalRanks]:
    if request.param > NUM_DEVICES:
        pytest.skip(f"needs {request.param} CUDA devices, and there are {NUM_DEVICES}")
    with LocalRanks(request.param, timeout_s=TIMEOUT_S) as ranks:
        yield ranks


def build_axis(degree: int) -> tuple[Axis, torch.device]:
    device = torch.device("cuda", torch.cuda.current_device())
    return build_mesh(MeshShape(tp=degree), device=device).tp, device


def run_all(degree: int, num_rows: int, dtype: torch.dtype) -> int:
    """Every pass by every method; nothing waits on the host until the results are compared."""
    axis, device = build_axis(degree)
    ring, library = RingTransport(axis), LibraryTransport(axis)
    number = 0
    for case, method, chunks in list_runs(num_rows, degree, (1, 3)):
        for transport in (ring, library) if method is Method.NONE else (ring,):
            with trace.record() as recorded:
                run = run_case(case, method, chunks, transport, dtype=dtype, device=device)
            where = (transport.capability.name, case, method, chunks)
            assert run.wrong == [], (run.wrong, *where)
            if method is not Method.NONE:
                sent = [entry.message for entry in recorded.moved if entry.direction == "sent"]
                assert sent == run.program.messages_sent, where
            number += 1
    return number


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 256])
def test_every_pass_by_every_method_is_the_dense_one(devices, num_rows, dtype):
    numbers = devices.call(run_all, degree=devices.world_size, num_rows=num_rows, dtype=dtype)
    assert min(numbers) == max(numbers) > 50


def run_again(degree: int) -> None:
    """Buffers that are used again while the device is still busy with what they held before."""
    axis, device = build_axis(degree)
    transport = RingTransport(axis)
    case = Case("column", "backward", True, 4096, degree)
    with transport.measure_stalls(device) as stalls:
        runs = [run_case(case, method, 4, transport, device=device) for method in (Method.DIRECT, Method.RING) * 10]
    assert all(run.wrong == [] for run in runs)
    assert stalls.pairs
    assert stalls.read_total_s() >= 0.0


def test_runs_that_follow_each_other_closely_do_not_disturb_each_other(devices):
    devices.call(run_again, degree=devices.world_size)


def run_fused(degree: int, dtype: torch.dtype) -> str | None:
    """The reason why not, or None if the products were the dense ones."""
    axis, device = build_axis(degree)
    if (reason := why_not(axis, device)) is not None:
        return reason
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(device, torch.float64)

    num_rows, width, own = 64 * degree, 32, slice(64 * axis.rank, 64 * (axis.rank + 1))
    x, weights = draw(num_rows, width), [draw(48, width), draw(16, width)]
    partials, weight = [draw(num_rows, width) for _ in range(degree)], draw(48, width)
    for needs_full in (True, False):
        x_full, products = all_gather_matmul(
            x[own].to(dtype), [each.to(dtype).T for each in weights], axis, needs_full=needs_full
        )
        assert all(torch.equal(y, (x @ each.T).to(dtype)) for y, each in zip(products, weights, strict=True))
        assert torch.equal(x_full, x.to(dtype)) if needs_full else x_full is None
    y_shard = matmul_reduce_scatter(partials[axis.rank].to(dtype), weight.to(dtype).T, axis)
    assert torch.equal(y_shard, (sum(partials) @ weight.T)[own].to(dtype))
    return None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_operations_of_symmetric_memory_are_the_dense_ones_or_say_why_not(devices, dtype):
    reasons = set(devices.call(run_fused, degree=devices.world_size, dtype=dtype))
    assert len(reasons) == 1
    if (reason := reasons.pop()) is not None:
        assert re.match("cuda:. cannot read the memory of cuda:.|no symmetric memory: .", reason)
        pytest.skip(reason)
