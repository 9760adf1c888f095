"""Quantized linears over several ranks give what they give on one: sharding changes no quantized value."""

import pytest

from plait.comm.mesh import build_mesh
from plait.config.overlap import OverlapConfig
from plait.parallel.apply import receipt_of
from plait.sharding import MeshShape
from tests.support.quantized import (
    RECIPES,
    TOKENS,
    WIDTH,
    build_config,
    build_model,
    draw,
    find_errors,
    run_twin,
    run_whole,
)

SAME = 1e-12
"""Sums of a few thousand float64 products in another order; one number quantized otherwise shows as 1e-4 and more."""


def run_parity(
    *, tp: int, recipe: str, sequence_parallel: bool, overlap: dict[str, object], tokens: int = TOKENS
) -> dict[str, float]:
    mesh = build_mesh(MeshShape(tp=tp), shared_memory=overlap.get("transport") == "shm")
    quantization = build_config(recipe)
    x, grad = draw(tokens, WIDTH, seed=1), draw(tokens, WIDTH, seed=2)
    wanted = run_twin(quantization, x, grad)
    model = build_model(
        mesh, quantization, sequence_parallel=sequence_parallel, overlap=OverlapConfig.model_validate(overlap)
    )
    found = run_whole(model, mesh, x, grad, sequence_parallel=sequence_parallel)
    receipt = receipt_of(model)
    assert receipt is not None
    ran = {line.choice.transport for line in receipt.lines if line.sent_bytes}
    assert ran == {overlap.get("transport", "library")}, ran
    return find_errors(found, wanted)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_rank(ranks, tp, recipe, sequence_parallel):
    """Uneven tokens and columns, a rank without tokens (tp = 4): y, dx, every dw and db."""
    found = ranks(tp).call(
        run_parity, tp=tp, recipe=recipe, sequence_parallel=sequence_parallel, overlap={"policy": "disabled"}
    )
    for errors in found:
        assert max(errors.values()) < SAME, errors


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("transport", ["ring", "shm"])
@pytest.mark.parametrize("method", ["none", "direct", "ring", "ring_two_way"])
def test_every_schedule_gives_the_same(ranks, method, transport, recipe, sequence_parallel):
    """Five blocks of tokens over three ranks: two pieces of a block each, but for the last."""
    overlap = {"policy": "full", "method": method, "transport": transport}
    if method != "none":
        overlap["chunks"] = 2
    found = ranks(3).call(
        run_parity, tp=3, recipe=recipe, sequence_parallel=sequence_parallel, overlap=overlap, tokens=160
    )
    for errors in found:
        assert max(errors.values()) < SAME, errors
