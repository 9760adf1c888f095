"""An activation that is applied inside a gather group, rows by rows, equals the unsharded one bit for bit on integers.

Rows that were not there yet show in y, gradients that were not computed yet in dw, what other readers of a column's
output sent back in dx and dw.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.comm.mesh import Mesh, build_mesh
from plait.config.overlap import OverlapConfig
from plait.contract.plan import Activation, Column, Plan
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.region.activation import PointwiseActivation
from plait.parallel.shard import gather_tensor
from plait.parallel.tokens import gather_tokens, shard_tokens
from plait.sharding import MeshShape

WIDTH, FEATURES = 5, 7
FLOAT64_ROUNDING = {"rtol": 1e-12, "atol": 1e-12}
OVERLAPS = {
    "disabled": OverlapConfig(),
    "full": OverlapConfig(policy="full", transport="ring", method="direct", chunks=2),
}
MODES = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
EACH_OVERLAP = pytest.mark.parametrize("overlap", OVERLAPS)


class Product(PointwiseActivation):
    """Exact on integers. It notes of how many rows it was computed at a time."""

    num_inputs = 2

    def __init__(self) -> None:
        super().__init__()
        self.forward_rows: list[int] = []
        self.backward_rows: list[int] = []

    def compute(self, gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
        self.forward_rows.append(gate.shape[0])
        return torch.mul(gate, up, out=out)

    def compute_gradients(self, grad, inputs, outs) -> None:
        self.backward_rows.append(grad.shape[0])
        for other, out in zip(reversed(inputs), outs, strict=True):
            torch.mul(grad, other, out=out)


class Mlp(nn.Module):
    """`reads` says what is done with the outputs of the columns."""

    def __init__(self, activation: nn.Module, reads: str = "once") -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, FEATURES), nn.Linear(WIDTH, FEATURES)
        self.activation = activation
        self.down = nn.Linear(FEATURES, WIDTH, bias=False)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        match self.reads:
            case "once":
                h = self.activation(gate, up)
            case "gate elsewhere":
                h = self.activation(gate, up) + 2 * gate
            case "in another order":
                h = self.activation(up, gate)
            case "twice":
                h = self.activation(gate, up) + self.activation(2 * gate, up)
            case "not at all":
                h = gate - up
        return self.down(h)


PLAN = {
    "mlp.gate": Column(group="in"),
    "mlp.up": Column(group="in"),
    "mlp.activation": Activation("in"),
    "mlp.down": "row",
}


@dataclass(frozen=True)
class Pair:
    """The same MLP unsharded and sharded."""

    dense: nn.Module
    model: nn.Module
    mesh: Mesh
    sequence_parallel: bool

    def forward(self, x: Tensor) -> Tensor:
        y = self.model["mlp"](shard_tokens(x, self.mesh) if self.sequence_parallel else x)
        return gather_tokens(y, self.mesh) if self.sequence_parallel else y

    def check_gradients(self, **tolerance: float) -> None:
        for name, param in self.dense.named_parameters():
            own = self.model.get_parameter(name).grad
            assert (own is None) == (param.grad is None), name
            if own is not None:
                assert_same(gather_tensor(own, ownership_of(self.model)[name], self.mesh), param.grad, **tolerance)


def assert_same(actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    assert torch.equal(actual, expected) if not tolerance else torch.allclose(actual, expected, **tolerance)


def build_pair(kind: type[nn.Module], tp: int, *, overlap: str, sequence_parallel: bool, reads: str = "once") -> Pair:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = (nn.ModuleDict({"mlp": Mlp(kind(), reads)}) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param, other in zip(dense.parameters(), model.parameters(), strict=True):
            other.copy_(param.copy_(torch.randint(-2, 3, param.shape, generator=generator)))
    parallelize(model, mesh, Plan(PLAN, sequence_parallel=sequence_parallel), overlap=OVERLAPS[overlap])
    return Pair(dense, model, mesh, sequence_parallel)


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_integers(
    *,
    tp: int,
    overlap: str,
    sequence_parallel: bool,
    reads: str = "once",
    frozen: tuple[str, ...] = (),
    needs_x: bool = True,
    checkpointed: bool = False,
    shape: tuple[int, ...] = (11,),
) -> tuple[list[int], list[int]]:
    """How many rows the activation was computed of at a time, forward and backward."""
    pair = build_pair(Product, tp, overlap=overlap, sequence_parallel=sequence_parallel, reads=reads)
    for module in (pair.dense, pair.model):
        for name in frozen:
            module["mlp"].get_parameter(name).requires_grad_(False)
    x, grad = integers(*shape, WIDTH, seed=1), integers(*shape, WIDTH, seed=2)
    x.requires_grad_(needs_x)
    x_dense = x.detach().clone().requires_grad_(needs_x)
    # Two micro-batches: what the first leaves behind must not show in the second.
    for _ in range(2):
        y = checkpoint(pair.forward, x, use_reentrant=False) if checkpointed else pair.forward(x)
        y_dense = pair.dense["mlp"](x_dense)
        y.backward(grad)
        y_dense.backward(grad)
    assert torch.equal(y, y_dense)
    assert not needs_x or torch.equal(x.grad, x_dense.grad)
    pair.check_gradients()
    activation = pair.model["mlp"].activation
    assert pair.model["mlp"].gate.group.activated is None, "what was activated was held beyond the forward"
    return activation.forward_rows, activation.backward_rows


@EACH_OVERLAP
@MODES
@pytest.mark.parametrize("tp", [2, 3])
def test_rows_are_activated_as_they_complete(ranks, tp, sequence_parallel, overlap):
    """Each row once, forward and backward; the module itself computes nothing."""
    for forward, backward in ranks(tp).call(run_integers, tp=tp, overlap=overlap, sequence_parallel=sequence_parallel):
        assert sum(forward) == sum(backward) == 2 * 11
        # Own rows and two chunks of each other rank. In all-reduce mode no forward is cut: nothing comes.
        assert len(forward) == 2 * (2 * tp - 1 if overlap == "full" and sequence_parallel else 1)
        assert (len(backward) > 2) == (overlap == "full")


@EACH_OVERLAP
@MODES
@pytest.mark.parametrize("reads", ["gate elsewhere", "in another order", "twice", "not at all"])
def test_outputs_of_the_columns_may_be_read_otherwise(ranks, reads, sequence_parallel, overlap):
    """Their gradients are added to what comes through the activation."""
    ranks(2).call(run_integers, tp=2, overlap=overlap, sequence_parallel=sequence_parallel, reads=reads)


@EACH_OVERLAP
@MODES
@pytest.mark.parametrize(
    "frozen",
    [(), ("gate.weight",), ("gate.weight", "up.weight"), ("gate.weight", "gate.bias", "up.weight", "up.bias")],
    ids=["nothing", "one weight", "weights", "columns"],
)
@pytest.mark.parametrize("needs_x", [True, False], ids=["dx", "no dx"])
def test_any_gradient_may_be_unwanted(ranks, needs_x, frozen, sequence_parallel, overlap):
    """Without dx the rows are filled by wgrad, without either for the biases."""
    ranks(2).call(
        run_integers, tp=2, overlap=overlap, sequence_parallel=sequence_parallel, frozen=frozen, needs_x=needs_x
    )


@EACH_OVERLAP
@MODES
def test_a_checkpointed_region_activates_again(ranks, sequence_parallel, overlap):
    for forward, backward in ranks(2).call(
        run_integers, tp=2, overlap=overlap, sequence_parallel=sequence_parallel, checkpointed=True
    ):
        assert (sum(forward), sum(backward)) == (4 * 11, 2 * 11)


def test_whole_activations_may_have_more_dims(ranks):
    ranks(2).call(run_integers, tp=2, overlap="full", sequence_parallel=False, shape=(3, 4))


def run_real(*, overlap: str, sequence_parallel: bool) -> None:
    pair = build_pair(plait.SwiGLU, 2, overlap=overlap, sequence_parallel=sequence_parallel)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(11, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(11, WIDTH, generator=generator, dtype=torch.float64)
    x_dense = x.detach().clone().requires_grad_()
    pair.model.double()
    dense = pair.dense.double()["mlp"]
    y = pair.forward(x)
    y_dense = dense.down(F.silu(dense.gate(x_dense)) * dense.up(x_dense))
    y.backward(grad)
    y_dense.backward(grad)
    assert_same(y, y_dense, **FLOAT64_ROUNDING)
    assert_same(x.grad, x_dense.grad, **FLOAT64_ROUNDING)
    pair.check_gradients(**FLOAT64_ROUNDING)


@EACH_OVERLAP
@MODES
def test_swiglu_is_the_plain_expression(ranks, sequence_parallel, overlap):
    ranks(2).call(run_real, overlap=overlap, sequence_parallel=sequence_parallel)
