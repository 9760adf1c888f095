"""A block written flat: norms, projections and residual sums in one module, whose input is not what the columns read.

Bit for bit on small integers. A gather at the wrong place shows in the residual, a gradient reduced together with that
of the residual in dx (tp times too large in all-reduce mode), a norm that got all tokens in the gradient of its scale.
"""

import pytest
import torch
from torch import Tensor, nn

from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.contract.plan import Column, Plan
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.shard import gather_tensor
from plait.parallel.tokens import gather_tokens, shard_tokens
from plait.sharding import Kind, MeshShape

WIDTH = 5


class Scale(nn.Module):
    """A token-local module that is exact on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD * self.weight


class FlatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = Scale(), Scale()
        self.q, self.k = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 7, bias=False)
        self.o = nn.Linear(7, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.down = nn.Linear(4, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TD = self.first_norm(x_TD)
        x_TD = x_TD + self.o(self.q(h_TD) - self.k(h_TD))
        h_TD = self.second_norm(x_TD)
        return x_TD + self.down(self.gate(h_TD) + 2 * self.up(h_TD))


class Residual(nn.Module):
    """Nothing but a region and a residual sum around it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.down(self.up(x_TD))


FLAT = {
    "block.*_norm": "token_local",
    "block.q": Column(group="qk"),
    "block.k": Column(group="qk"),
    "block.o": "row",
    "block.gate": Column(group="gate_up"),
    "block.up": Column(group="gate_up"),
    "block.down": "row",
}
RESIDUAL = {"block.up": Column(group="up"), "block.down": "row"}


def _build(kind: type[nn.Module]) -> nn.Module:
    model = nn.ModuleDict({"block": kind()})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator))
    return model


def _integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_block(*, kind: type[nn.Module], plan: dict, tp: int, sequence_parallel: bool) -> list[Kind]:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = _build(kind), _build(kind)
    parallelize(model, mesh, Plan(plan, sequence_parallel=sequence_parallel))
    x, grad = _integers(7, WIDTH, seed=1).requires_grad_(), _integers(7, WIDTH, seed=2)
    x_dense = x.detach().clone().requires_grad_()
    with record() as trace:
        y = model["block"](shard_tokens(x, mesh) if sequence_parallel else x)
        y = gather_tokens(y, mesh) if sequence_parallel else y
    y.backward(grad)
    y_dense = dense["block"](x_dense)
    y_dense.backward(grad)

    assert torch.equal(y, y_dense)
    assert torch.equal(x.grad, x_dense.grad)
    for name, param in dense.named_parameters():
        own = model.get_parameter(name).grad
        assert torch.equal(gather_tensor(own, ownership_of(model)[name], mesh), param.grad), name
    return [issued.kind for issued in trace.collectives]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_flat_block_equals_single_device_bit_for_bit(ranks, tp, sequence_parallel):
    """FIELD 3.6, 3.7, 3.8: a value that is used inside and outside of a region has its gradient reduced inside only."""
    issued = ranks(tp).call(run_block, kind=FlatBlock, plan=FLAT, tp=tp, sequence_parallel=sequence_parallel)
    once = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER] if sequence_parallel else [Kind.ALL_REDUCE]
    assert issued == [once * 2 + ([Kind.ALL_GATHER] if sequence_parallel else [])] * tp


def test_a_residual_sum_in_the_parent_is_not_reduced_with_the_region(ranks):
    ranks(2).call(run_block, kind=Residual, plan=RESIDUAL, tp=2, sequence_parallel=False)


class Pair(nn.Module):
    """A region of two columns, of which either may be left out of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.used = ("left", "right")

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(sum(getattr(self, name)(x_TD) for name in self.used))


class Container(nn.Module):
    """Columns in a container that is never called, as the heads of a user's module may be."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"left": nn.Linear(WIDTH, 7), "right": nn.Linear(WIDTH, 7)})
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(self.inner["left"](x_TD) + self.inner["right"](x_TD))


PAIR = {"block.left": Column(group="in"), "block.right": Column(group="in"), "block.down": "row"}
CONTAINER = {"block.inner.left": Column(group="in"), "block.inner.right": Column(group="in"), "block.down": "row"}


def test_columns_in_a_container_that_is_never_called_share_their_gather(ranks):
    issued = ranks(2).call(run_block, kind=Container, plan=CONTAINER, tp=2, sequence_parallel=True)
    assert issued == [[Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_GATHER]] * 2


def run_pair(*, used: tuple[str, ...], frozen: tuple[str, ...], sequence_parallel: bool) -> list[Kind]:
    """Kinds issued in backward; parameters without a gradient have none on the ranks either."""
    mesh = build_mesh(MeshShape(tp=2))
    dense, model = _build(Pair), _build(Pair)
    for module in (dense, model):
        module["block"].used = used
        for name in frozen:
            module["block"].get_submodule(name).requires_grad_(False)
    parallelize(model, mesh, Plan(PAIR, sequence_parallel=sequence_parallel))
    x, grad = _integers(7, WIDTH, seed=1).requires_grad_(), _integers(7, WIDTH, seed=2)
    x_dense = x.detach().clone().requires_grad_()
    y = model["block"](shard_tokens(x, mesh) if sequence_parallel else x)
    y = gather_tokens(y, mesh) if sequence_parallel else y
    with record() as trace:
        y.backward(grad)
    dense["block"](x_dense).backward(grad)
    assert torch.equal(x.grad, x_dense.grad)
    for name, param in dense.named_parameters():
        own = model.get_parameter(name).grad
        assert (own is None) == (param.grad is None), name
        assert own is None or torch.equal(gather_tensor(own, ownership_of(model)[name], mesh), param.grad), name
    assert model["block"].left.group.outputs == {}, "an output was held beyond the forward"
    return [issued.kind for issued in trace.collectives]


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("used", [("left",), ("right",)], ids=str)
def test_a_member_that_is_not_used_has_no_gradient_and_is_not_waited_for(ranks, used, sequence_parallel):
    ranks(2).call(run_pair, used=used, frozen=(), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("frozen", [("left",), ("left", "right"), ("left", "right", "down")], ids=str)
def test_frozen_members_pass_the_gradient_of_their_input_on(ranks, frozen, sequence_parallel):
    """Nothing is gathered for the gradient of a weight that wants none."""
    issued = ranks(2).call(run_pair, used=("left", "right"), frozen=frozen, sequence_parallel=sequence_parallel)
    again = [] if "right" in frozen else [Kind.ALL_GATHER]
    region = [Kind.ALL_GATHER, *again, Kind.REDUCE_SCATTER] if sequence_parallel else [Kind.ALL_REDUCE]
    ends = [Kind.ALL_GATHER] if sequence_parallel else []
    assert issued == [region + ends] * 2
