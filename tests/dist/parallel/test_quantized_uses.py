"""Quantized linears used otherwise than in a plain step give what they give on one rank, too."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plait.comm.mesh import Mesh, build_mesh
from plait.parallel.apply import ownership_of
from plait.parallel.precision.model import update_amax_history
from plait.parallel.shard import gather_tensor
from plait.parallel.tokens import gather_tokens, shard_tokens
from plait.sharding import MeshShape
from tests.support.lone_mesh import build_lone_mesh
from tests.support.quantized import RECIPES, TOKENS, WIDTH, Model, build_config, build_model, draw, find_errors
from tests.support.verification import verify

SAME = 1e-12
"""Sums of a few thousand float64 products in another order; one number quantized otherwise shows as 1e-4 and more."""

Use = Callable[[Model, Tensor], Tensor]


def frozen_input(model: Model, x: Tensor) -> Tensor:
    return model(x.detach())


def frozen_weights(model: Model, x: Tensor) -> Tensor:
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("left.weight") or "layers.1.mlp.down.bias" in name)
    return model(x)


def frozen_weights_and_input(model: Model, x: Tensor) -> Tensor:
    """The first group has members without a gradient at all, whose magnitudes are remembered all the same."""
    return frozen_weights(model, x.detach())


def one_member_read(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer.mlp.down(layer.mlp.left(x))  # type: ignore[operator, union-attr]
    return x


def twice(model: Model, x: Tensor) -> Tensor:
    return model(0.5 * model(x))


def after_inference(model: Model, x: Tensor) -> Tensor:
    """What inference saw is no part of a step, and what it made first may be read by one."""
    with torch.inference_mode():
        model(8 * x.detach())
    return model(x)


USES: dict[str, Use] = {
    use.__name__: use
    for use in (frozen_input, frozen_weights, frozen_weights_and_input, one_member_read, twice, after_inference)
}


def run_steps(use: Use, recipe: str, mesh: Mesh) -> dict[str, Tensor]:
    """Two steps, as delayed scales look back in the second; all of that one, whole."""
    tp = mesh.tp.degree
    model = build_model(mesh, build_config(recipe), sequence_parallel=tp > 1)
    for step in range(2):
        model.zero_grad()
        x = draw(TOKENS, WIDTH, seed=1 + step).requires_grad_()
        y = gather_tokens(use(model, shard_tokens(x, mesh)), mesh) if tp > 1 else use(model, x)
        y.backward(draw(TOKENS, WIDTH, seed=3 + step))
        update_amax_history(model)
    ownership = ownership_of(model)
    grads = {
        name: gather_tensor(param.grad, ownership[name], mesh)
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return {"y": y.detach(), **grads, **({} if x.grad is None else {"dx": x.grad})}


def run_use(*, tp: int, use: str, recipe: str) -> dict[str, float]:
    wanted = run_steps(USES[use], recipe, build_lone_mesh(1))
    return find_errors(run_steps(USES[use], recipe, build_mesh(MeshShape(tp=tp))), wanted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use", USES)
def test_every_use_gives_what_it_gives_on_one_rank(ranks, use, recipe):
    for errors in ranks(2).call(run_use, tp=2, use=use, recipe=recipe):
        assert max(errors.values()) < SAME, errors


@pytest.mark.parametrize("recipe", ["fp8_delayedscaling", "mxfp8"])
def test_a_head_that_is_the_embedding_too_is_quantized_alone(ranks, recipe):
    """One parameter: as a table it is read as it is, and its gradient is that of both uses."""
    report = verify(
        ranks(2), "llama-tiny", 2, "model.tied_embeddings=true", "model.vocab_size=128", "model.width=128",
        "model.num_heads=4", "model.num_kv_heads=2", "model.mlp_width=224", "train.seq_len=32",
        f"quantization={recipe}", "quantization.head=true", "quantization.layers=mlp_only",
        "quantization.keep_first=0", "quantization.keep_last=0",
    )  # fmt: skip
    assert report.passed, report.failures
