"""An MLP with everything overlapped, on CUDA devices over NCCL: the unsharded one, bit for bit on integers.

A machine with fewer than two CUDA devices skips it and says so.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from plait.comm.launch import LocalRanks
from plait.comm.mesh import Mesh, build_mesh
from plait.config.overlap import OverlapConfig
from plait.overlap.receipt import check_strict
from plait.overlap.transport.symm_mem import why_not
from plait.parallel.apply import receipt_of
from plait.sharding import MeshShape
from tests.support.linear_pair import WIDTH, Gated, Pair, Plain, Product, build_pair, draw

NUM_DEVICES = torch.cuda.device_count()
TOKENS = 512
KINDS = {"plain": Plain, "gated": partial(Gated, Product)}


@pytest.fixture(scope="module", params=[2, 4])
def devices(request: pytest.FixtureRequest) -> Iterator[LocalRanks]:
    if request.param > NUM_DEVICES:
        pytest.skip(f"needs {request.param} CUDA devices, and there are {NUM_DEVICES}")
    with LocalRanks(request.param, timeout_s=120.0) as ranks:
        yield ranks


def build_device_mesh(degree: int) -> Mesh:
    return build_mesh(MeshShape(tp=degree), device=torch.device("cuda", torch.cuda.current_device()))


def compare(pair: Pair) -> int:
    """How many messages moved in two passes, of which the second uses the memory of the first again."""
    device, num_moved = pair.mesh.device, 0
    for seed in (1, 2):
        trace = pair.compare(draw(TOKENS, WIDTH, seed=seed).to(device), draw(TOKENS, WIDTH, seed=-seed).to(device))
        assert trace.collectives == pair.derive_contract(TOKENS)
        num_moved += len(trace.moved)
    receipt = receipt_of(pair.model)
    assert receipt is not None
    check_strict(receipt)
    expected = {2} if num_moved else {0}
    assert {line.num_measured for line in receipt.lines} == expected, (
        "a device waits on its stream, and a library tells nobody"
    )
    return num_moved


def run_ring(degree: int, kind: str) -> float:
    """How long the computing stream stood still, by the receipt."""
    pair = build_pair(KINDS[kind], build_device_mesh(degree), OverlapConfig(policy="full", transport="ring"))
    assert compare(pair) > 0
    receipt = receipt_of(pair.model)
    assert receipt is not None
    return sum(line.measured_exposed_s for line in receipt.lines)


@pytest.mark.parametrize("kind", KINDS)
def test_point_to_point_it_is_the_unsharded_one_and_its_stalls_are_measured(devices, kind):
    assert min(devices.call(run_ring, degree=devices.world_size, kind=kind)) > 0.0


def run_symm_mem(degree: int, kind: str) -> str | None:
    mesh = build_device_mesh(degree)
    if (reason := why_not(mesh.tp, mesh.device)) is not None:
        return reason
    pair = build_pair(KINDS[kind], mesh, OverlapConfig(policy="full", transport="symm_mem"))
    assert compare(pair) == 0
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_by_fused_operations_it_is_the_unsharded_one_or_they_say_why_not(devices, kind):
    reasons = set(devices.call(run_symm_mem, degree=devices.world_size, kind=kind))
    assert len(reasons) == 1
    if (reason := reasons.pop()) is not None:
        pytest.skip(reason)
