"""A gather that one backward begins for the next: the same numbers, and nothing lost where it is not used."""

from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import plait
from plait.comm import trace
from plait.comm.mesh import Mesh, build_mesh
from plait.config.overlap import OverlapConfig
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.parallel.apply import parallelize, record_of
from plait.sharding import MeshShape

FULL = OverlapConfig(policy="full", transport="ring", method="direct", chunks=2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = x + pair(x)
        return x


class Log:
    """An instrument that remembers which programs ran."""

    def __init__(self, matmul: CollectiveMatmul) -> None:
        self.matmul, self.programs = matmul, []

    def enter(self, what, gemms):
        self.programs.append(self.matmul.running)
        return gemms

    def note(self, step, start_s, end_s):
        pass

    def leave(self):
        pass


def build(degree: int) -> tuple[nn.Module, Mesh, Log]:
    torch.manual_seed(0)
    mesh = build_mesh(MeshShape(tp=degree))
    plan = plait.Plan({f"pairs.*.{name}": role for name, role in (("up", "column"), ("down", "row"))})
    model = parallelize(Stack().double(), mesh, plan, overlap=FULL)
    matmul = record_of(model).matmul
    log = matmul.instrument = Log(matmul)
    return model, mesh, log


def run_step(model: nn.Module, mesh: Mesh, rows: int) -> list[Tensor]:
    """The gradients of x and of every parameter."""
    generator = torch.Generator().manual_seed(rows)
    whole = torch.randn(rows, 6, dtype=torch.float64, generator=generator).requires_grad_()
    model.zero_grad()
    plait.gather_tokens(model(plait.shard_tokens(whole, mesh)), mesh).square().sum().backward()
    return [whole.grad, *(param.grad.clone() for param in model.parameters())]


def compare(degree: int) -> list[bool]:
    model, mesh, log = build(degree)
    with trace.record() as ahead:
        found = run_step(model, mesh, 9)
    begun = [(program.ahead is not None, program.is_begun) for program in log.programs]
    with patch.object(CollectiveMatmul, "_find_pair", lambda *_: None), trace.record() as without:
        expected = run_step(model, mesh, 9)
    assert ahead.issued == without.issued
    assert len(ahead.moved) == len(without.moved)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    return begun


def test_what_is_begun_ahead_changes_no_bit_and_no_collective(ranks):
    for degree in (2, 3):
        forward = [(False, False)] * 4
        backward = [(True, False), (False, True)] * 2
        assert ranks(degree).call(compare, degree=degree) == [forward + backward] * degree


def leave_unused() -> None:
    """A backward that ends between the two passes; then another model over the same group; then a full step."""
    model, mesh, log = build(2)
    other, other_mesh, _ = build(2)
    expected = run_step(model, mesh, 7)
    x = plait.shard_tokens(torch.ones(7, 6, dtype=torch.float64), mesh)
    for layer, next_model, next_mesh in ((1, model, mesh), (0, other, other_mesh)):
        y = model.pairs[layer](x.requires_grad_())
        for begins in (True, False):
            del log.programs[:]
            # The row's weight wants no more than the row's own backward, which begins the gather for the column's, but
            # not again.
            torch.autograd.grad(y.sum(), model.pairs[layer].down.weight, retain_graph=True)
            assert [program.ahead is not None for program in log.programs] == [begins]
            y = model.pairs[layer](x)
        found = run_step(next_model, next_mesh, 7)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_what_is_begun_and_not_used_is_let_arrive_and_dropped(ranks):
    ranks(2).call(leave_unused)


def checkpoint_pairs() -> list[bool]:
    model, mesh, log = build(2)
    expected = run_step(model, mesh, 7)
    forward = Pair.forward
    del log.programs[:]

    def recomputed(pair: Pair, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(forward, pair, x, use_reentrant=False)

    with patch.object(Pair, "forward", recomputed):
        found = run_step(model, mesh, 7)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    return [program.ahead is not None for program in log.programs]


def test_a_checkpointed_region_keeps_nothing_for_it(ranks):
    """What it would gather has been given up for memory; it is there again when the region is computed again."""
    assert not any(map(any, ranks(2).call(checkpoint_pairs)))
