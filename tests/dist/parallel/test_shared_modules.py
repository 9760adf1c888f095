"""Modules that are used under several names, called by keyword, and copied: what plain PyTorch allows stays allowed."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import plait
from plait import ownership_of
from plait.parallel.shard import shard_tensor

VOCAB, WIDTH, HIDDEN, TOKENS = 13, 6, 10, 7

TOLERANCE = 1e-12
"""Relative, in float64: one forward and backward, whose sums differ in order only."""


class Scale(nn.Module):
    """A user's own norm, which takes its input by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *, x: Tensor) -> Tensor:
        return self.factor * x / x.norm(dim=-1, keepdim=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Scale()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x=x)
        return x + self.down(input=torch.relu(self.gate(input=h)) * self.up(input=h))


class Albert(nn.Module):
    """Every layer is the same block, the last norm that of the block."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([block, block])
        self.norm = block.norm
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, *, ids: Tensor) -> Tensor:
        x = self.embed(input=ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(input=self.norm(x=x))


def build_plan(sequence_parallel):
    gate_up = plait.Column(group="gate_up")
    roles = {"embed": "vocab_embedding", "layers.*.norm": "token_local", "norm": "token_local", "head": "vocab_head"}
    roles |= {"layers.*.gate": gate_up, "layers.*.up": gate_up, "layers.*.down": "row"}
    return plait.Plan(roles, sequence_parallel=sequence_parallel)


def build_albert():
    torch.manual_seed(0)
    return Albert().double()


def compute_gradients(model, mesh=None):
    draw = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(VOCAB, (2, TOKENS), generator=draw)
    logits = model(ids=ids)
    plait.vocab_parallel_cross_entropy(logits, targets, mesh, vocab_size=VOCAB).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def compare_with_single_device(sequence_parallel):
    mesh = plait.build_mesh(plait.MeshShape(tp=3))
    model = plait.parallelize(build_albert(), mesh, build_plan(sequence_parallel))
    assert model.layers[0] is model.layers[1]
    assert model.norm is model.layers[0].norm
    whole, own = compute_gradients(build_albert()), compute_gradients(model, mesh)
    assert list(own) == list(whole)
    for name, grad in own.items():
        expected = shard_tensor(whole[name], ownership_of(model)[name], mesh.tp.rank)
        torch.testing.assert_close(grad, expected, rtol=TOLERANCE, atol=TOLERANCE)


def copy_and_compare(sequence_parallel):
    mesh = plait.build_mesh(plait.MeshShape(tp=3))
    model = plait.parallelize(build_albert(), mesh, build_plan(sequence_parallel))
    compute_gradients(model, mesh)
    copied = deepcopy(model)
    copied.zero_grad()
    assert plait.mesh_of(copied) is mesh
    for (name, grad), copied_grad in zip(
        compute_gradients(model, mesh).items(), compute_gradients(copied, mesh).values(), strict=True
    ):
        assert torch.equal(grad, 2 * copied_grad), name
    with torch.no_grad():
        for param in copied.head.parameters():
            param.zero_()
    assert not model(ids=torch.arange(TOKENS)).eq(0).all()
    assert copied(ids=torch.arange(TOKENS)).eq(0).all()


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
def test_a_module_under_several_names_called_by_keyword_is_parallelized_once(ranks, sequence_parallel):
    ranks(3).call(compare_with_single_device, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
def test_a_copy_of_a_parallel_model_is_a_model_of_its_own_on_the_same_mesh(ranks, sequence_parallel):
    ranks(3).call(copy_and_compare, sequence_parallel=sequence_parallel)
