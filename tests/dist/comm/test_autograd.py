"""Every row of the table, forward and backward, equals one process that holds the true value, bit for bit.

A tensor in some state stands for one true value v. With integer weights w, the loss <w, y> is the same number however y
is spread, so dL/dv is known: w where y is used alike or in shards, the sum of the w of all ranks where each uses all of
y in its own way. A wrong backward collective shows as a factor of the degree, as the addend of one rank, or as the
interval of another.
"""

import pytest
import torch
from torch import Tensor

from plait.comm.autograd import redistribute
from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.sharding import (
    Invariant,
    MeshShape,
    Partial,
    Placement,
    Replicate,
    Shard,
    Split,
    Transition,
    build_split,
    derive_transition,
    list_transitions,
)

LENGTHS = (7, 5, 1, 0, 8)
ROWS = [row for row in list_transitions() if Shard not in (type(row.source), type(row.target))]


def integers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def strided(x: Tensor) -> Tensor:
    """The same values with strides that no collective takes."""
    return x.transpose(0, -1).contiguous().transpose(0, -1).repeat_interleave(2, dim=0)[::2]


def own_part(value: Tensor, placement: Placement, splits: tuple[Split, ...], rank: int) -> Tensor:
    if not isinstance(placement, Shard):
        return value
    interval = splits[placement.dim].intervals[rank]
    return value.narrow(placement.dim, interval.start, len(interval))


def run_transition(source: Placement, target: Placement, shape: tuple[int, ...]) -> None:
    degree = torch.distributed.get_world_size()
    axis = build_mesh(MeshShape(tp=degree)).tp
    splits = tuple(build_split(length, degree) for length in shape)
    value, weights = integers(shape, 1), [integers(shape, 10 + rank) for rank in range(degree)]
    if isinstance(source, Partial):
        addends = [integers(shape, 20 + rank) for rank in range(degree)]
        value, own = torch.stack(addends).sum(0), addends[axis.rank]
    else:
        own = own_part(value, source, splits, axis.rank)
    grad_value = torch.stack(weights).sum(0) if isinstance(target, Replicate) else weights[0]
    weight = weights[axis.rank] if isinstance(target, Replicate) else own_part(weights[0], target, splits, axis.rank)

    x = strided(own).detach().requires_grad_()
    named = [splits[placement.dim] for placement in (source, target) if isinstance(placement, Shard)]
    with record() as trace:
        y = redistribute(
            x, axis, source, target, split=named[0] if named else None, target_split=named[-1] if named else None
        )
        (grad,) = torch.autograd.grad(y, x, strided(weight))

    assert torch.equal(y, own_part(value, target, splits, axis.rank)), (source, target, y)
    assert torch.equal(grad, own_part(grad_value, source, splits, axis.rank)), (source, target, grad)
    row = derive_transition(source, target)
    assert [entry.kind for entry in trace.collectives] == [k for k in (row.forward, row.backward) if k.is_collective]
    assert all(entry.shape == shape for entry in trace.collectives)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.source}->{row.target}")
def test_rows_without_a_shard(ranks, world_size: int, row: Transition):
    ranks(world_size).call(run_transition, source=row.source, target=row.target, shape=(5, 3))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    ("source", "target"),
    [(Shard, Replicate), (Partial, Shard), (Shard, Invariant), (Invariant, Shard)],
    ids=lambda placement: placement.__name__,
)
def test_rows_with_a_shard_on_every_dim_and_uneven(ranks, world_size, length, dim, source, target):
    """FIELD 3.5, 3.25: the input gradient is looked at, on every rank, also where the split is uneven."""
    states = [placement(dim) if placement is Shard else placement() for placement in (source, target)]
    shape = tuple(length if index == dim else 2 for index in range(3))
    ranks(world_size).call(run_transition, source=states[0], target=states[1], shape=shape)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize("length", LENGTHS)
def test_from_one_shard_to_another(ranks, world_size, first, second, length):
    shape = tuple(length if index == first else 5 for index in range(3))
    ranks(world_size).call(run_transition, source=Shard(first), target=Shard(second), shape=shape)


def differentiate_twice() -> tuple[Tensor, Tensor]:
    axis = build_mesh(MeshShape(tp=2)).tp
    split = build_split(3, 2)
    x = torch.arange(3.0)[slice(0, 2) if axis.rank == 0 else slice(2, 3)].requires_grad_()
    y = redistribute(x, axis, Shard(0), Replicate(), split=split)
    (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    return grad.detach(), second


def test_a_gradient_can_be_differentiated_again(ranks):
    """L is the sum over both ranks of y^3, so dL/dx = 6 x^2, and its sum has the gradient 12 x."""
    grads, seconds = zip(*ranks(2).call(differentiate_twice), strict=True)
    assert torch.cat(grads).tolist() == [0.0, 6.0, 24.0]
    assert torch.cat(seconds).tolist() == [0.0, 12.0, 24.0]


def use_one_of_two() -> tuple[list[str], Tensor]:
    """Rank 1 does not use what it has gathered."""
    axis = build_mesh(MeshShape(tp=2)).tp
    x = torch.ones(2, requires_grad=True)
    y = redistribute(x, axis, Shard(0), Replicate(), split=build_split(4, 2))
    loss = (y if axis.rank == 0 else 0 * y).sum()
    with record() as trace:
        loss.backward()
    assert x.grad is not None
    return [entry.kind for entry in trace.collectives], x.grad


def test_a_rank_that_does_not_need_the_gradient_joins_its_collective_all_the_same(ranks):
    for kinds, grad in ranks(2).call(use_one_of_two):
        assert kinds == ["reduce_scatter"]
        assert grad.tolist() == [1.0, 1.0]
