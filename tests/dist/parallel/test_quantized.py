"""Quantized linears over several ranks give what they give on one: sharding changes no quantized value."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.config.overlap import OverlapConfig
from plait.contract.quantization import list_orientations
from plait.errors import ConfigError, PlaitError, ShardingError
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.execute import Outcome
from plait.overlap.site import Pass
from plait.parallel.apply import receipt_of, record_of
from plait.parallel.precision.model import update_amax_history
from plait.parallel.tokens import gather_tokens, shard_tokens
from plait.schedule.work import Operation
from plait.sharding import MeshShape
from tests.support.lone_mesh import build_lone_mesh
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


def run_compiled(*, tp: int) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    model = build_model(mesh, build_config("mxfp8"), sequence_parallel=False)
    torch.compile(model, backend="aot_eager")(draw(TOKENS, WIDTH, seed=1))


def test_compiling_is_refused(ranks):
    with pytest.raises(ConfigError, match=r"layers.0.mlp.in: quantized linears are not compiled"):
        ranks(2).call(run_compiled, tp=2)


def run_checkpointed(*, tp: int, recipe: str, reentrant: bool) -> dict[str, bool]:
    """Whether everything has the same bits where each block is computed again in backward."""
    mesh = build_mesh(MeshShape(tp=tp))
    x, grad = draw(TOKENS, WIDTH, seed=1), draw(TOKENS, WIDTH, seed=2)
    results = []
    for is_checkpointed in (False, True):
        model = build_model(mesh, build_config(recipe), sequence_parallel=True)
        if is_checkpointed:
            for layer in model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
        for _ in range(2):  # delayed scales look back in the second step
            model.zero_grad()
            found = run_whole(model, mesh, x, grad, sequence_parallel=True)
            update_amax_history(model)
        results.append(found)
    plain, again = results
    return {name: torch.equal(plain[name], again[name]) for name in plain}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_computed_again_has_the_same_bits(ranks, recipe, reentrant):
    for same in ranks(2).call(run_checkpointed, tp=2, recipe=recipe, reentrant=reentrant):
        assert all(same.values()), same


def run_nonfinite(*, tp: int, recipe: str, where: str, sequence_parallel: bool, everywhere: bool) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    model = build_model(mesh, build_config(recipe), sequence_parallel=sequence_parallel)
    x, grad = draw(TOKENS, WIDTH, seed=1), draw(TOKENS, WIDTH, seed=2)
    is_here = everywhere or mesh.tp.rank == 0
    if where == "input" and is_here:
        x[3, 5] = torch.nan
    if where == "gradient":
        grad[7, 2] = torch.inf
    run_whole(model, mesh, x, grad, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("recipe", ["fp8_currentscaling", "nvfp4"])
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("input", "layers.0.mlp.left: its input has values that are not finite"),
        ("gradient", "layers.1.mlp.down: its output's gradient has values that are not finite"),
    ],
)
def test_what_is_not_finite_is_named_on_every_rank(ranks, where, said, recipe, sequence_parallel):
    """Of tokens that one rank has, all are told: magnitudes are agreed on before anything is quantized.

    The error is as one rank would raise it, because all have.
    """
    with pytest.raises(PlaitError, match=f"^{said}"):
        ranks(2).call(
            run_nonfinite, tp=2, recipe=recipe, where=where, sequence_parallel=sequence_parallel, everywhere=True
        )


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_currentscaling"])
def test_ranks_do_not_wait_for_one_that_found_something_alone(ranks, recipe):
    """Blocks have their own scales, so no other rank hears of it; the group ends all the same."""
    with pytest.raises(PlaitError, match=r"layers.0.mlp.left: its input has values that are not finite"):
        ranks(2).call(run_nonfinite, tp=2, recipe=recipe, where="input", sequence_parallel=True, everywhere=False)


def run_bulk(*, tp: int, recipe: str, sequence_parallel: bool) -> dict[str, float]:
    mesh, quantization = build_mesh(MeshShape(tp=tp)), build_config(recipe)
    x, grad = draw(TOKENS, WIDTH, seed=1), draw(TOKENS, WIDTH, seed=2)
    overlap = OverlapConfig(policy="full", method="bulk", transport="ring")
    model = build_model(mesh, quantization, sequence_parallel=sequence_parallel, overlap=overlap)
    found = run_whole(model, mesh, x, grad, sequence_parallel=sequence_parallel)
    receipt = receipt_of(model)
    assert receipt is not None
    assert {line.operation for line in receipt.lines if line.choice.overlaps} == {Operation.COLUMN_BACKWARD}
    return find_errors(found, run_twin(quantization, x, grad))


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bulk_gives_the_same(ranks, recipe, sequence_parallel):
    """Whole tensors under the GEMM that does not need them, as only a backward of columns has."""
    for errors in ranks(2).call(run_bulk, tp=2, recipe=recipe, sequence_parallel=sequence_parallel):
        assert max(errors.values()) < SAME, errors


def run_bfloat16(*, tp: int, recipe: str) -> tuple[float, float]:
    """How far bfloat16 over several ranks is from bfloat16 on one, and that from float64 on one."""
    mesh, quantization = build_mesh(MeshShape(tp=tp)), build_config(recipe)
    x, grad = (draw(TOKENS, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    model = build_model(mesh, quantization, sequence_parallel=True, dtype=torch.bfloat16)
    found = run_whole(model, mesh, x, grad, sequence_parallel=True)
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    twin = run_twin(quantization, x, grad)
    exact = run_twin(quantization, x.double(), grad.double())
    doubled = {name: each.double() for name, each in twin.items()}
    return max(find_errors(found, twin).values()), max(find_errors(doubled, exact).values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_bfloat16_sharding_changes_no_more_than_rounding_does(ranks, recipe):
    """A sum that is rounded to 8 bits otherwise lets numbers fall into the next code, over ranks as on one."""
    for sharded, rounded in ranks(2).call(run_bfloat16, tp=2, recipe=recipe):
        assert 0 < sharded < rounded


def run_payloads(*, tp: int, recipe: str) -> dict[str, bool]:
    """Whether the bytes that the first columns gather are those of the whole input, quantized on one rank."""
    mesh, lone = build_mesh(MeshShape(tp=tp)), build_lone_mesh(1)
    model = build_model(mesh, build_config(recipe), sequence_parallel=True)
    twin = build_model(lone, build_config(recipe), sequence_parallel=False)
    x, grad = draw(TOKENS, WIDTH, seed=1), draw(TOKENS, WIDTH, seed=2)
    gathered: dict[str, torch.Tensor] = {}
    run = CollectiveMatmul.run

    def watch(matmul: CollectiveMatmul, what: Pass, **kwargs: Any) -> Outcome:
        outcome = run(matmul, what, **kwargs)
        if what.site.label == "layers.0.mlp.in":
            assert outcome.full is not None
            gathered[what.operation] = outcome.full.clone()
        return outcome

    with patch.object(CollectiveMatmul, "run", watch):
        run_whole(model, mesh, x, grad, sequence_parallel=True)
    record = record_of(twin)
    assert record is not None
    assert record.precision is not None
    scheme = record.precision.linears["layers.0.mlp.left"].build()
    read = list_orientations(scheme.recipe.input, ("forward", "wgrad"))
    whole = scheme.quantize("input", x, read, scheme.find_scales("input", x, read, notes=False))
    parts = whole.payload.split(whole.payload.shape[1] // len(read), dim=1)
    return {
        "forward": torch.equal(gathered[Operation.COLUMN_FORWARD], parts[0]),
        "backward": torch.equal(gathered[Operation.COLUMN_BACKWARD], parts[-1]),
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tp", [2, 3])
def test_gathered_bytes_are_those_of_the_whole_tensor(ranks, tp, recipe):
    """Each rank quantizes its own tokens; scales of blocks travel with them."""
    assert ranks(tp).call(run_payloads, tp=tp, recipe=recipe) == [{"forward": True, "backward": True}] * tp


def run_receipt(*, tp: int, recipe: str, overlap: dict[str, object]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The lines, and what was sent by label as it was recorded."""
    mesh = build_mesh(MeshShape(tp=tp))
    model = build_model(
        mesh, build_config(recipe), sequence_parallel=True, overlap=OverlapConfig.model_validate(overlap)
    )
    x = shard_tokens(draw(TOKENS, WIDTH, seed=1), mesh).requires_grad_()
    with record() as trace:
        model(x).sum().backward()
    receipt = receipt_of(model)
    assert receipt is not None
    sent: dict[str, int] = {}
    for moved in trace.moved:
        if moved.direction == "sent":
            sent[moved.label] = sent.get(moved.label, 0) + moved.num_bytes
    return receipt.to_json()["lines"], sent


def test_receipt_says_which_recipe_runs_and_how_many_bytes_it_sends(ranks):
    overlap = {"policy": "full", "method": "direct", "transport": "ring", "chunks": 1}
    for lines, sent in ranks(2).call(run_receipt, tp=2, recipe="mxfp8", overlap=overlap):
        assert {line["recipe"] for line in lines} == {"mxfp8"}
        assert {line["kernel"] for line in lines} == {"emulated, float64 accumulator"}
        assert all("float64" in line["kernel_reason"] for line in lines)
        assert all(line["transport"] == "ring" for line in lines)
        for label, num_bytes in sent.items():
            assert num_bytes == sum(line["sent_bytes"] for line in lines if line["label"] == label)


def test_bytes_of_a_gather_are_those_of_numbers_and_scales(ranks):
    """Rank 0 has 64 of 96 tokens: of 64 features 64 bytes and 2 scales, and for backward the same in columns."""
    overlap = {"policy": "disabled"}
    lines, _ = ranks(2).call(run_receipt, tp=2, recipe="mxfp8", overlap=overlap)[0]
    sent = {line["operation"]: line["sent_bytes"] for line in lines if line["label"] == "layers.0.mlp.in"}
    row_bytes = 64 + 2
    assert sent["column forward"] == TOKENS * row_bytes // 2


def run_inference(*, tp: int, recipe: str, tokens: int) -> float:
    mesh, lone = build_mesh(MeshShape(tp=tp)), build_lone_mesh(1)
    model = build_model(mesh, build_config(recipe), sequence_parallel=True)
    twin = build_model(lone, build_config(recipe), sequence_parallel=False)
    x = draw(tokens, WIDTH, seed=1)
    with torch.no_grad():
        y, wanted = gather_tokens(model(shard_tokens(x, mesh)), mesh), twin(x)
    return find_errors({"y": y}, {"y": wanted})["y"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_gradients_any_number_of_tokens_will_do(ranks, recipe):
    """One token over three ranks, of which two have none; blocks of tokens are for wgrad alone."""
    for tokens in (7, 1):
        assert max(ranks(3).call(run_inference, tp=3, recipe=recipe, tokens=tokens)) < SAME


def run_odd_tokens(*, tp: int, sequence_parallel: bool) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    model = build_model(mesh, build_config("mxfp8"), sequence_parallel=sequence_parallel)
    run_whole(model, mesh, draw(40, WIDTH, seed=1), draw(40, WIDTH, seed=2), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
def test_with_gradients_tokens_are_whole_blocks(ranks, sequence_parallel):
    with pytest.raises(ShardingError, match=r"layers.0.mlp.left: 40 tokens are no whole blocks of 32"):
        ranks(2).call(run_odd_tokens, tp=2, sequence_parallel=sequence_parallel)
