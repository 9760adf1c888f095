"""How the fused operations of CUDA symmetric memory are called, with torch's own stand-ins for them on the CPU.

On CUDA devices tests/gpu/overlap runs the operations themselves.
"""

from dataclasses import replace

import pytest
import torch

from plait.comm import trace
from plait.comm.mesh import build_mesh
from plait.contract.collective import Collective
from plait.errors import ShardingError, TransportError
from plait.overlap.transport.symm_mem import all_gather_matmul, matmul_reduce_scatter, why_not, why_not_for
from plait.sharding import Kind, MeshShape
from tests.support.collective_gemm import Case
from tests.support.symmetric_memory import stand_ins

T, K, N = 8, 6, 5


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def run_fused() -> list[Collective]:
    axis = build_mesh(MeshShape(tp=2)).tp
    x, weights = draw(T, K), [draw(N, K, seed=1), draw(2, K, seed=2)]
    own = slice(axis.rank * T // 2, (axis.rank + 1) * T // 2)
    partials = [draw(T, K, seed=3 + rank) for rank in range(2)]
    with stand_ins(), trace.record() as recorded:
        x_full, products = all_gather_matmul(x[own], [weight.T for weight in weights], axis, label="up")
        not_needed, _ = all_gather_matmul(x[own], [weights[0].T], axis, needs_full=False)
        y_shard = matmul_reduce_scatter(partials[axis.rank], weights[0].T, axis)
    assert torch.equal(x_full, x)
    assert not_needed is None
    assert all(torch.equal(product, x @ weight.T) for product, weight in zip(products, weights, strict=True))
    assert torch.equal(y_shard, (sum(partials) @ weights[0].T)[own])
    return recorded.collectives


def test_the_fused_operations_are_given_what_they_take_and_are_traced_as_what_they_move(ranks):
    gather = Collective(Kind.ALL_GATHER, "tp", 2, (T, K), "float64")
    expected = [gather, gather, Collective(Kind.REDUCE_SCATTER, "tp", 2, (T, N), "float64")]
    assert ranks(2).call(run_fused) == [expected, expected]


def ask_why_not() -> None:
    axis = build_mesh(MeshShape(tp=2)).tp
    assert why_not(axis, torch.device("cpu")) == "symmetric memory is for CUDA devices, and tensors are on cpu"
    alone = replace(axis, degree=1, group=None)
    assert why_not(alone, torch.device("cuda", 0)) == "there is one rank"
    with pytest.raises(ShardingError, match="^up: 7 rows cannot be cut into 2 pieces of one length"):
        matmul_reduce_scatter(torch.zeros(7, K), torch.zeros(K, N), axis, label="up")


def test_what_the_machine_cannot_do_is_said(ranks):
    ranks(2).call(ask_why_not)


def fail_on_cpu() -> None:
    axis = build_mesh(MeshShape(tp=2)).tp
    all_gather_matmul(torch.zeros(4, K), [torch.zeros(K, N)], axis, label="up")


def test_an_operation_that_fails_is_an_error_of_the_transport():
    from plait.comm.launch import LocalRanks

    with (
        LocalRanks(2, timeout_s=30, device_type="cpu") as fresh,
        pytest.raises(TransportError, match=r"all_gather \[8x6\] float32 over tp \(up\) failed: Could not run"),
    ):
        fresh.call(fail_on_cpu)


def ask_for_work(reduce_dtype: torch.dtype | None, dtype: torch.dtype) -> list[str | None]:
    axis = replace(build_mesh(MeshShape(tp=2)).tp, reduce_dtype=reduce_dtype)
    cases = [
        Case("column", "forward", True, 8, 2),
        Case("row", "forward", True, 8, 2),
        Case("row", "forward", True, 7, 2),
        Case("column", "forward", True, 0, 2),
        Case("row", "forward", False, 8, 2),
        Case("column", "forward", False, 8, 2),
        Case("column", "backward", True, 8, 2, needs_dgrad=False),
    ]
    return [why_not_for(case.work, dtype, axis) for case in cases]


def test_what_the_operations_cannot_do_is_said(ranks):
    other = [
        "7 rows cannot be cut into 2 pieces of one length, as the fused operations need them",
        "0 rows cannot be cut into 2 pieces of one length, as the fused operations need them",
        "there is no fused operation for an all-reduce",
        "nothing moves",
        "there is no fused operation for wgrad alone",
    ]
    assert ranks(2).call(ask_for_work, reduce_dtype=None, dtype=torch.bfloat16)[0] == [None, None, *other]
    assert ranks(2).call(ask_for_work, reduce_dtype=torch.bfloat16, dtype=torch.bfloat16)[0] == [None, None, *other]
    carried = "addends travel in bfloat16, but sums are to be carried in float32"
    assert ranks(2).call(ask_for_work, reduce_dtype=torch.float32, dtype=torch.bfloat16)[0] == [None, carried, *other]
