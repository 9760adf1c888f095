"""Column, row and gather groups equal the unsharded linears bit for bit on small integers: y, dx, dw and db.

A wrong shard shows in y, a missing input-gradient reduction in dx, a missing gather in dw, a repeated bias in y and db.
"""

import pytest
import torch
from torch import Tensor, nn

from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.contract.plan import Column, Plan, Row
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.shard import gather_tensor
from plait.parallel.tokens import gather_tokens, shard_tokens
from plait.sharding import KeyValueHeads, Kind, MeshShape, QueryHeads

WIDTH = 6


class Region(nn.Module):
    """Two columns that read one input, a product of their outputs, a row; the input is read once more on the side."""

    def __init__(self, features: int, *, bias: bool) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, features, bias=bias)
        self.right = nn.Linear(WIDTH, features, bias=bias)
        self.down = nn.Linear(features, WIDTH, bias=bias)
        self.reads_shape_first = 0

    def forward(self, x: Tensor) -> Tensor:
        self.reads_shape_first = x.shape[0]
        return self.down(self.left(x) + 2 * self.right(x))


class Model(nn.Module):
    def __init__(self, features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.region = Region(features, bias=bias)
        self.alone = nn.Linear(WIDTH, features, bias=bias)
        self.back = nn.Linear(features, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.alone(x + self.region(x)))


PLAN = {
    "region.left": Column(group="in"),
    "region.right": Column(group="in"),
    "region.down": "row",
    "alone": "column",
    "back": "row",
}


def fill_integers(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator))


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def assert_grads_equal(model: nn.Module, dense: nn.Module, mesh) -> None:
    wanted = dict(dense.named_parameters())
    for name, param in model.named_parameters():
        whole = gather_tensor(param.grad, ownership_of(model)[name], mesh)
        assert torch.equal(whole, wanted[name].grad), f"gradient of {name} differs"


def run_region(*, tp: int, features: int, tokens: int, sequence_parallel: bool, bias: bool) -> int:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = Model(features, bias=bias), Model(features, bias=bias)
    fill_integers(dense)
    fill_integers(model)
    parallelize(model, mesh, Plan(PLAN, sequence_parallel=sequence_parallel))

    x = integers(tokens, WIDTH, seed=1).requires_grad_()
    x_dense = x.detach().clone().requires_grad_()
    grad = integers(tokens, WIDTH, seed=2)
    y = gather_tokens(model(shard_tokens(x, mesh)), mesh) if sequence_parallel else model(x)
    y_dense = dense(x_dense)
    y.backward(grad)
    y_dense.backward(grad)

    assert torch.equal(y, y_dense)
    assert torch.equal(x.grad, x_dense.grad)
    assert_grads_equal(model, dense, mesh)
    assert model.region.left.group.outputs == {}, "an output was held beyond its use"
    return model.region.reads_shape_first


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(
    ("tp", "features", "tokens"), [(2, 8, 6), (2, 7, 7), (3, 8, 7), (3, 97, 2), (4, 11, 5)], ids=str
)
def test_region_equals_single_device_bit_for_bit(ranks, tp, features, tokens, sequence_parallel, bias):
    """FIELD 3.5, 3.16, 3.25: all of y, dx, dw, db; the row bias once; any number of tokens and features."""
    seen = ranks(tp).call(
        run_region, tp=tp, features=features, tokens=tokens, sequence_parallel=sequence_parallel, bias=bias
    )
    assert seen == [tokens] * tp, "the region's parent must see the gathered input"


def run_count(*, tp: int, sequence_parallel: bool) -> list[str]:
    mesh = build_mesh(MeshShape(tp=tp))
    model = Model(8)
    fill_integers(model)
    parallelize(model, mesh, Plan(PLAN, sequence_parallel=sequence_parallel))
    x = integers(6, WIDTH, seed=1)
    if sequence_parallel:
        x = shard_tokens(x, mesh).detach()
    with record() as trace:
        model(x.requires_grad_()).sum().backward()
    return [issued.kind for issued in trace.collectives]


def test_members_of_a_group_share_one_gather_and_one_reduction(ranks):
    """Forward: gather, scatter per region. Backward: gather dy; gather x again, scatter dx; per region."""
    gather, scatter = Kind.ALL_GATHER, Kind.REDUCE_SCATTER
    forward = [gather, scatter] * 2
    backward = [gather, gather, scatter] * 2
    assert ranks(2).call(run_count, tp=2, sequence_parallel=True) == [forward + backward] * 2


def test_all_reduce_mode_issues_one_reduction_each_way_per_region(ranks):
    assert ranks(2).call(run_count, tp=2, sequence_parallel=False) == [[Kind.ALL_REDUCE] * 4] * 2


class Attention(nn.Module):
    """Projections cut by heads; the keys a query head reads are picked by its group, so a wrong owner changes y."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.wq = nn.Linear(WIDTH, num_heads * head_width)
        self.wk = nn.Linear(WIDTH, num_kv_heads * head_width)
        self.wo = nn.Linear(num_heads * head_width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_width))
        k = self.wk(x).unflatten(-1, (-1, self.head_width))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return self.wo((q + 3 * k).flatten(1))


def run_heads(*, tp: int, heads: tuple[int, int, int], sequence_parallel: bool) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = nn.ModuleDict({"a": Attention(*heads)}), nn.ModuleDict({"a": Attention(*heads)})
    fill_integers(dense)
    fill_integers(model)
    plan = {
        "a.wq": Column(QueryHeads(*heads), group="qk"),
        "a.wk": Column(KeyValueHeads(*heads), group="qk"),
        "a.wo": Row(QueryHeads(*heads)),
    }
    parallelize(model, mesh, Plan(plan, sequence_parallel=sequence_parallel))
    x = integers(5, WIDTH, seed=1).requires_grad_()
    x_dense = x.detach().clone().requires_grad_()
    y = gather_tokens(model["a"](shard_tokens(x, mesh)), mesh) if sequence_parallel else model["a"](x)
    y_dense = dense["a"](x_dense)
    grad = integers(5, WIDTH, seed=2)
    y.backward(grad)
    y_dense.backward(grad)
    assert torch.equal(y, y_dense)
    assert torch.equal(x.grad, x_dense.grad)
    assert_grads_equal(model, dense, mesh)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize(
    ("tp", "heads"),
    [(3, (8, 8, 2)), (2, (8, 4, 2)), (3, (8, 2, 2)), (4, (8, 2, 2)), (4, (4, 1, 3)), (4, (12, 3, 1))],
    ids=str,
)
def test_heads_are_cut_in_kv_groups_and_shared_kv_gradients_summed(ranks, tp, heads, sequence_parallel):
    """FIELD 3.10, 3.22, 3.23: uneven by whole groups, replicated below one, the replicas' gradients summed."""
    ranks(tp).call(run_heads, tp=tp, heads=heads, sequence_parallel=sequence_parallel)


class SideReader(nn.Module):
    """Uses its gathered input outside the projections, and calls a member with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, *, hidden: Tensor) -> Tensor:
        mean = hidden.sum(0, keepdim=True)
        return self.down(self.up(hidden) + self.up(2 * hidden + mean))


def run_side_reader(*, tp: int) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = nn.ModuleDict({"r": SideReader()}), nn.ModuleDict({"r": SideReader()})
    fill_integers(dense)
    fill_integers(model)
    parallelize(model, mesh, Plan({"r.up": Column(group="up"), "r.down": "row"}))
    x = integers(7, WIDTH, seed=1).requires_grad_()
    x_dense = x.detach().clone().requires_grad_()
    y = gather_tokens(model["r"](hidden=shard_tokens(x, mesh)), mesh)
    y_dense = dense["r"](hidden=x_dense)
    grad = integers(7, WIDTH, seed=2)
    y.backward(grad)
    y_dense.backward(grad)
    assert torch.equal(y, y_dense)
    assert torch.equal(x.grad, x_dense.grad)
    assert_grads_equal(model, dense, mesh)


def test_gathered_input_is_differentiable_beside_the_projections(ranks):
    ranks(3).call(run_side_reader, tp=3)
