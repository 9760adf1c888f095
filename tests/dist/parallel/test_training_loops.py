"""Things that training loops do around a model: activation checkpointing, accumulation, evaluation in between."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait import parallelize, vocab_parallel_cross_entropy
from plait.comm.mesh import Mesh, build_mesh
from plait.comm.trace import record
from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.contract.collective import Collective
from plait.contract.model import ModelContract, derive_model, derive_plan
from plait.contract.setting import Setting
from plait.contract.step import list_collectives
from plait.models import build_model, initialize
from plait.parallel.apply import ownership_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.shard import gather_tensor
from plait.sharding import MeshShape

FLOAT64_ROUNDING = {"rtol": 1e-10, "atol": 1e-13}
"""Two orders of summation through two float64 layers."""

SIZES = {"num_layers": 2, "width": 24, "num_heads": 4, "vocab_size": 19, "max_seq_len": 8}
CONFIGS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**SIZES, num_kv_heads=2, mlp_width=31, qkv_bias=True),
    "gpt with dropout": GptConfig(**SIZES, dropout=0.3, attention_dropout=0.2),
}
MODES = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
MODELS = pytest.mark.parametrize("name", CONFIGS)


def build(config: ModelConfig, mesh: Mesh | None = None, *, sequence_parallel: bool = True) -> nn.Module:
    model = build_model(config, dtype=torch.float64)
    initialize(model, config, seed=0)
    seed_dropout(model, 5)
    set_dropout_offset(model, 0)
    if mesh is not None:
        parallelize(model, mesh, derive_plan(config, sequence_parallel=sequence_parallel))
    return model


def build_tokens(batch: int, seq_len: int) -> Tensor:
    return torch.arange(batch * seq_len).view(batch, seq_len) * 5 % 19


def compute_loss(model: nn.Module, tokens: Tensor, mesh: Mesh | None) -> Tensor:
    return vocab_parallel_cross_entropy(model(tokens), tokens.flatten().roll(-1), mesh, vocab_size=19, reduction="sum")


def assert_gradients_close(model: nn.Module, dense: nn.Module, mesh: Mesh) -> None:
    for (name, param), whole in zip(model.named_parameters(), dense.parameters(), strict=True):
        grad = gather_tensor(param.grad, ownership_of(model)[name], mesh)
        torch.testing.assert_close(grad, whole.grad, **FLOAT64_ROUNDING, msg=lambda text, name=name: f"{name}: {text}")


def list_expected(contract: ModelContract) -> Iterator[Collective]:
    """Forward and loss as ever; in backward each block goes forward once more before it goes backward."""
    again = [c for op in contract.block for c in list_collectives(op.forward)]
    backward = [c for op in reversed(contract.block) for c in list_collectives(op.backward)]
    yield from (*contract.forward_collectives, *contract.loss_collectives)
    yield from (c for op in reversed(contract.exit) for c in list_collectives(op.backward))
    yield from (again + backward) * contract.config.num_layers
    yield from (c for op in reversed(contract.entry) for c in list_collectives(op.backward))


def run_checkpointed(*, name: str, tp: int, sequence_parallel: bool, use_reentrant: bool) -> None:
    config, mesh, tokens = CONFIGS[name], build_mesh(MeshShape(tp=tp)), build_tokens(2, 7)
    plain, model = (build(config, mesh, sequence_parallel=sequence_parallel) for _ in range(2))
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)
    loss = compute_loss(plain, tokens, mesh)
    loss.backward()
    with record() as trace:
        again = compute_loss(model, tokens, mesh)
        again.backward()
    assert torch.equal(again, loss)
    for (param_name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad), param_name
    setting = Setting(2, 7, tp, mesh.tp.rank, sequence_parallel=sequence_parallel, dtype="float64")
    assert trace.collectives == list(list_expected(derive_model(config, setting)))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved tensors", "reentrant"])
@MODES
@MODELS
@pytest.mark.parametrize("tp", [2, 3])
def test_checkpointed_blocks_have_the_same_gradients_and_repeat_their_forward(
    ranks, tp, name, sequence_parallel, use_reentrant
):
    """FIELD 3.19: under activation checkpointing no collective is lost, and none is issued that is not due."""
    ranks(tp).call(run_checkpointed, name=name, tp=tp, sequence_parallel=sequence_parallel, use_reentrant=use_reentrant)


def run_accumulation(*, name: str, tp: int, sequence_parallel: bool, together: bool) -> None:
    config, mesh = CONFIGS[name], build_mesh(MeshShape(tp=tp))
    dense, model = build(config), build(config, mesh, sequence_parallel=sequence_parallel)
    micro_batches = [build_tokens(2, 7), build_tokens(1, 3), build_tokens(3, 5)]
    for each, own_mesh in ((dense, None), (model, mesh)):
        losses = []
        for tokens in micro_batches:
            losses.append(compute_loss(each, tokens, own_mesh))
            if not together:
                losses[-1].backward()
        if together:
            sum(losses).backward()
    assert_gradients_close(model, dense, mesh)


@pytest.mark.parametrize("together", [False, True], ids=["backward each", "one backward"])
@MODES
@MODELS
def test_micro_batches_of_different_lengths_add_up(ranks, name, sequence_parallel, together):
    """FIELD 3.25: 14, 3 and 15 tokens over two ranks; backward cuts as its own forward did."""
    ranks(2).call(run_accumulation, name=name, tp=2, sequence_parallel=sequence_parallel, together=together)


def run_evaluation(*, name: str, sequence_parallel: bool) -> None:
    config, mesh, tokens = CONFIGS[name], build_mesh(MeshShape(tp=2)), build_tokens(2, 7)
    dense, model = build(config), build(config, mesh, sequence_parallel=sequence_parallel)
    for each, own_mesh in ((dense, None), (model, mesh)):
        compute_loss(each, tokens, own_mesh).backward()
        with torch.no_grad():
            each.eval()
            each.evaluated = compute_loss(each, build_tokens(1, 5), own_mesh)
            each.train()
        with torch.inference_mode():
            each.inferred = compute_loss(each, build_tokens(1, 3), own_mesh)
        compute_loss(each, tokens, own_mesh).backward()
    assert not model.evaluated.requires_grad
    torch.testing.assert_close(model.evaluated, dense.evaluated, **FLOAT64_ROUNDING)
    torch.testing.assert_close(model.inferred, dense.inferred, **FLOAT64_ROUNDING)
    assert_gradients_close(model, dense, mesh)


@MODES
@MODELS
def test_an_evaluation_without_gradients_disturbs_no_training(ranks, name, sequence_parallel):
    ranks(2).call(run_evaluation, name=name, sequence_parallel=sequence_parallel)
