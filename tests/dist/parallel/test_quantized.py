"""Quantized linears over several ranks give what they give on one: sharding changes no quantized value."""

import pytest

from plait.comm.mesh import build_mesh
from plait.config.overlap import OverlapConfig
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
    *, tp: int, recipe: str, sequence_parallel: bool, method: str, transport: str, chunks: int
) -> dict[str, float]:
    mesh = build_mesh(MeshShape(tp=tp))
    quantization = build_config(recipe)
    overlap = None
    if method != "disabled":
        overlap = OverlapConfig(policy="full", method=method, transport=transport, chunks=chunks)
    x, grad = draw(TOKENS, WIDTH, seed=1), draw(TOKENS, WIDTH, seed=2)
    wanted = run_twin(quantization, x, grad)
    model = build_model(mesh, quantization, sequence_parallel=sequence_parallel, overlap=overlap)
    return find_errors(run_whole(model, mesh, x, grad, sequence_parallel=sequence_parallel), wanted)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_rank(ranks, tp, recipe, sequence_parallel):
    """Uneven tokens and columns, a rank without tokens (tp = 4): y, dx, every dw and db."""
    for errors in ranks(tp).call(
        run_parity,
        tp=tp,
        recipe=recipe,
        sequence_parallel=sequence_parallel,
        method="disabled",
        transport="auto",
        chunks=1,
    ):
        assert max(errors.values()) < SAME, errors
