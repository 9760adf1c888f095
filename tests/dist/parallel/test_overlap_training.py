"""What training loops do around a model, with every collective plaited into the GEMM beside it.

Gradients are those of the model that overlaps nothing, to the rounding of sums that are taken in pieces, and
what moves amounts to the collectives of the contract.
"""

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
from plait.config.overlap import OverlapConfig
from plait.contract.collective import Collective
from plait.contract.model import ModelContract, derive_model, derive_plan
from plait.contract.op import Op
from plait.contract.setting import Setting
from plait.contract.step import list_collectives
from plait.models import build_model, initialize
from plait.parallel.apply import receipt_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.sharding import Kind, MeshShape
from plait.verify.static.trace import find_difference

FLOAT64_ROUNDING = {"rtol": 1e-10, "atol": 1e-13}
BATCH, SEQ_LEN = 2, 7
SIZES = {"num_layers": 2, "width": 24, "num_heads": 4, "vocab_size": 19, "max_seq_len": 8}
CONFIGS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**SIZES, num_kv_heads=2, mlp_width=31, qkv_bias=True),
    "gpt with dropout": GptConfig(**SIZES, dropout=0.3, attention_dropout=0.2),
}
MODES = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
MODELS = pytest.mark.parametrize(("name", "method"), [("llama", "direct"), ("gpt with dropout", "ring")])


def build_both(name: str, method: str, mesh: Mesh, *, sequence_parallel: bool) -> tuple[nn.Module, nn.Module]:
    """The model that overlaps nothing, and the one that overlaps all."""
    config, models = CONFIGS[name], []
    for overlap in (OverlapConfig(), OverlapConfig(policy="full", transport="ring", method=method, chunks=2)):
        model = build_model(config, dtype=torch.float64)
        initialize(model, config, seed=0)
        seed_dropout(model, 5)
        set_dropout_offset(model, 0)
        parallelize(model, mesh, derive_plan(config, sequence_parallel=sequence_parallel), overlap=overlap)
        models.append(model)
    return models[0], models[1]


def run_micro_batch(model: nn.Module, mesh: Mesh, first: int = 0) -> list[Collective]:
    """One forward and backward, whose gradients are added to those there are; what it issued."""
    tokens: Tensor = (torch.arange(BATCH * SEQ_LEN).view(BATCH, SEQ_LEN) * 5 + first) % 19
    set_dropout_offset(model, first)
    with record() as trace:
        loss = vocab_parallel_cross_entropy(model(tokens), tokens.flatten().roll(-1), mesh, vocab_size=19)
        loss.backward()
    return trace.collectives


def derive_contract(name: str, mesh: Mesh, *, sequence_parallel: bool) -> ModelContract:
    setting = Setting(
        BATCH, SEQ_LEN, mesh.tp.degree, mesh.tp.rank, sequence_parallel=sequence_parallel, dtype="float64"
    )
    return derive_model(CONFIGS[name], setting)


def check_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(
                param.grad, other.grad, **FLOAT64_ROUNDING, msg=lambda text, n=name: f"{n}: {text}"
            )


def check_overlapped(model: nn.Module, *, method: str) -> None:
    """The comparison would be void if nothing was overlapped."""
    receipt = receipt_of(model)
    assert receipt is not None
    assert method in {line.choice.method for line in receipt.lines}


def check_issued(issued: list[Collective], promised: list[Collective]) -> None:
    assert (difference := find_difference(promised, issued)) is None, str(difference)


def run_checkpointed(*, name: str, method: str, sequence_parallel: bool) -> None:
    mesh = build_mesh(MeshShape(tp=2))
    plain, model = build_both(name, method, mesh, sequence_parallel=sequence_parallel)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    run_micro_batch(plain, mesh)
    issued = run_micro_batch(model, mesh)
    check_same_gradients(model, plain)
    check_overlapped(model, method=method)
    check_issued(issued, list(list_checkpointed(derive_contract(name, mesh, sequence_parallel=sequence_parallel))))


def list_checkpointed(contract: ModelContract) -> Iterator[Collective]:
    """In backward each block goes forward once more before it goes backward."""
    yield from (*contract.forward_collectives, *contract.loss_collectives)
    yield from list_backward(contract.exit)
    for _ in range(contract.config.num_layers):
        yield from (collective for op in contract.block for collective in list_collectives(op.forward))
        yield from list_backward(contract.block)
    yield from list_backward(contract.entry)


def list_backward(ops: tuple[Op, ...]) -> Iterator[Collective]:
    return (collective for op in reversed(ops) for collective in list_collectives(op.backward))


@MODES
@MODELS
def test_checkpointed_blocks_overlap_their_forward_again(ranks, name, method, sequence_parallel):
    ranks(2).call(run_checkpointed, name=name, method=method, sequence_parallel=sequence_parallel)


def run_accumulation(*, name: str, method: str, sequence_parallel: bool) -> None:
    mesh = build_mesh(MeshShape(tp=2))
    plain, model = build_both(name, method, mesh, sequence_parallel=sequence_parallel)
    contract = derive_contract(name, mesh, sequence_parallel=sequence_parallel)
    for first in (0, BATCH * SEQ_LEN):
        run_micro_batch(plain, mesh, first)
        check_issued(run_micro_batch(model, mesh, first), list(contract.micro_batch_collectives))
    check_same_gradients(model, plain)
    check_overlapped(model, method=method)


@MODES
@MODELS
def test_gradients_of_two_micro_batches_add_up(ranks, name, method, sequence_parallel):
    """A buffer that a schedule uses again must not be a gradient that autograd keeps."""
    ranks(2).call(run_accumulation, name=name, method=method, sequence_parallel=sequence_parallel)


def run_frozen(*, name: str, method: str, sequence_parallel: bool) -> None:
    mesh = build_mesh(MeshShape(tp=2))
    plain, model = build_both(name, method, mesh, sequence_parallel=sequence_parallel)
    for each in (plain, model):
        for layer in each.layers:
            layer.mlp.requires_grad_(False)
    run_micro_batch(plain, mesh)
    issued = run_micro_batch(model, mesh)
    check_same_gradients(model, plain)
    assert model.layers[0].mlp.w_up.weight.grad is None
    check_overlapped(model, method=method)
    check_issued(issued, list(list_frozen(derive_contract(name, mesh, sequence_parallel=sequence_parallel))))


def list_frozen(contract: ModelContract) -> Iterator[Collective]:
    """The columns of a frozen MLP gather nothing again; its row has to gather the gradient that it passes on."""
    yield from (*contract.forward_collectives, *contract.loss_collectives)
    for op in reversed(contract.ops):
        is_frozen_column = ".mlp.w_" in op.name and not op.name.endswith("w_down")
        for collective in list_collectives(op.backward):
            if not (is_frozen_column and collective.kind is Kind.ALL_GATHER):
                yield collective


@MODES
@MODELS
def test_frozen_weights_gather_nothing_and_pass_gradients_on(ranks, name, method, sequence_parallel):
    ranks(2).call(run_frozen, name=name, method=method, sequence_parallel=sequence_parallel)
