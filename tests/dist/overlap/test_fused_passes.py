"""A whole linear pair by fused operations, with torch's own stand-ins for them: as dense, and as its contract says."""

from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor, nn

import plait
from plait.comm.mesh import build_mesh
from plait.config.overlap import OverlapConfig
from plait.contract.collective import Collective
from plait.contract.plan import Plan
from plait.errors import ConfigError
from plait.overlap.receipt import Receipt, check_strict
from plait.parallel.apply import parallelize, receipt_of
from plait.sharding import MeshShape
from tests.support.linear_pair import PLAIN, WIDTH, Gated, Pair, Plain, Product, build_pair, draw
from tests.support.symmetric_memory import reachable

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
FORWARD, BACKWARD = [GATHER, SCATTER], [GATHER, SCATTER]
OVERLAP = OverlapConfig(policy="full", transport="symm_mem")
FLOAT64_ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def build(kind: Callable[[], nn.Module], tp: int, overlap: OverlapConfig = OVERLAP) -> Pair:
    with reachable():
        return build_pair(kind, build_mesh(MeshShape(tp=tp)), overlap)


def compare(pair: Pair, x: Tensor, grad: Tensor, **tolerance: float) -> tuple[list[Collective], list[str]]:
    """The collectives of one pass, and the fused operations that were called."""
    with reachable() as called:
        trace = pair.compare(x, grad, **tolerance)
    assert trace.moved == []
    return trace.collectives, called


def run_pair(*, tp: int, num_tokens: int, kind: Callable[[], nn.Module], is_exact: bool = True) -> Receipt:
    pair = build(kind, tp)
    tolerance = {} if is_exact else FLOAT64_ROUNDING
    for seed in (11, 12):  # the second time all is chosen and agreed on
        x, grad = draw(num_tokens, WIDTH, seed=seed), draw(num_tokens, WIDTH, seed=-seed)
        collectives, called = compare(pair, x, grad, **tolerance)
        assert collectives == pair.derive_contract(num_tokens)
        assert called == [*FORWARD, *BACKWARD]
    receipt = receipt_of(pair.model)
    assert receipt is not None
    return receipt


@pytest.mark.parametrize(("tp", "num_tokens"), [(2, 8), (3, 9)])
@pytest.mark.parametrize("kind", [Plain, partial(Gated, Product)], ids=["plain", "gated"])
def test_a_pair_by_fused_operations_is_the_dense_one_and_moves_what_its_contract_says(ranks, kind, tp, num_tokens):
    for receipt in ranks(tp).call(run_pair, tp=tp, num_tokens=num_tokens, kind=kind):
        ways = {str(line.operation): (str(line.choice.way), line.choice.is_as_asked) for line in receipt.lines}
        assert len(ways) == len(receipt.lines) == 4
        assert set(ways.values()) == {("direct over symm_mem", True)}
        assert [line.num_messages for line in receipt.lines] == [1, 1, 1, 2]
        # Nothing of it can be timed by the host.
        assert {(line.num_measured, line.to_json()["measured_exposed_s"]) for line in receipt.lines} == {(0, None)}


def test_swiglu_is_the_plain_expression(ranks):
    ranks(2).call(run_pair, tp=2, num_tokens=8, kind=partial(Gated, plait.SwiGLU), is_exact=False)


def run_what_does_not_fit() -> list[str]:
    """Rows that cannot be cut evenly, and an input that is read otherwise."""
    overlap = OVERLAP.model_copy(update={"chunks": 2})
    uneven, twice = build(Plain, 2, overlap), build(partial(Gated, Product, reads_twice=True), 2, overlap)
    _, called = compare(uneven, draw(7, WIDTH, seed=1), draw(7, WIDTH, seed=2))
    assert called == []
    _, called = compare(twice, draw(8, WIDTH, seed=1), draw(8, WIDTH, seed=2))
    assert called == [GATHER, SCATTER, GATHER]
    lines = [line for pair in (uneven, twice) for line in receipt_of(pair.model).lines]
    with pytest.raises(ConfigError, match="7 rows cannot be cut into 2 pieces"):
        check_strict(receipt_of(uneven.model))
    return [f"{line.operation}: {line.choice.way}: {line.choice.reason}" for line in lines]


def test_what_the_operations_cannot_do_the_library_does_and_the_receipt_says_why(ranks):
    uneven = "none: symm_mem: 7 rows cannot be cut into 2 pieces of one length, as the fused operations need them"
    fused = "direct over symm_mem: symm_mem has no chunks"
    assert ranks(2).call(run_what_does_not_fit)[0] == [
        *(f"{each}: {uneven}" for each in ("column forward", "row forward", "row backward", "column backward")),
        *(f"{each}: {fused}" for each in ("column forward", "row forward", "row backward")),
        "column backward: none: symm_mem: dgrad is more than a product: others read the gathered input",
    ]


def run_sometimes(*, tp: int) -> tuple[list[str], list[tuple[str, int]]]:
    """Whether the gathered input is read otherwise changes from one step to the next."""
    pair = build(partial(Gated, Product), tp)
    called = []
    for reads_twice in (False, True, False):
        pair.dense.reads_twice = pair.model.reads_twice = reads_twice
        collectives, seen = compare(pair, draw(6, WIDTH, seed=1), draw(6, WIDTH, seed=2))
        assert collectives == pair.derive_contract(6)
        called += seen
    return called, [(str(line.choice.way), line.num_measured) for line in receipt_of(pair.model).lines]


def test_a_run_that_does_not_fit_where_others_did_is_the_librarys_and_has_its_own_line(ranks):
    every, but_dgrad = [*FORWARD, *BACKWARD], [*FORWARD, GATHER]
    lines = [("direct over symm_mem", 0)] * 4 + [("none", 1)]
    assert ranks(2).call(run_sometimes, tp=2) == [([*every, *but_dgrad, *every], lines)] * 2


def ask_without_cuda() -> None:
    with pytest.raises(ConfigError, match="symm_mem: symmetric memory is for CUDA devices, and tensors are on cpu"):
        parallelize(Plain(), build_mesh(MeshShape(tp=2)), Plan(PLAIN), overlap=OVERLAP)


def test_without_cuda_it_is_refused(ranks):
    ranks(2).call(ask_without_cuda)
