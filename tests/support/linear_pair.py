"""An MLP of column and row linears, unsharded and sharded, compared forward and backward on the same numbers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.comm.trace import Trace, record
from plait.config.overlap import OverlapConfig
from plait.contract.collective import Collective
from plait.contract.linear import build_linear_parameters, derive_column_group, derive_row
from plait.contract.plan import Activation, Column, Plan
from plait.contract.setting import Setting
from plait.contract.step import Move
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.region.activation import PointwiseActivation
from plait.parallel.shard import gather_tensor
from plait.parallel.tokens import gather_tokens, shard_tokens

WIDTH, FEATURES = 5, 7


class Product(PointwiseActivation):
    """Gated as SwiGLU is, and exact on integers."""

    num_inputs = 2

    def compute(self, gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.mul(gate, up, out=out)

    def compute_gradients(self, grad, inputs, outs) -> None:
        for other, out in zip(reversed(inputs), outs, strict=True):
            torch.mul(grad, other, out=out)


class Gated(nn.Module):
    """`reads_twice`: one column is given something else, which is made of the gathered input."""

    def __init__(self, activation: type[nn.Module], *, reads_twice: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, FEATURES), nn.Linear(WIDTH, FEATURES)
        self.activation = activation()
        self.down = nn.Linear(FEATURES, WIDTH)
        self.reads_twice = reads_twice

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(2 * x) if self.reads_twice else self.up(x)
        return self.down(self.activation(self.gate(x), up))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, FEATURES, bias=False), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.relu(self.widen(x)))


GATED = {"gate": Column(group="in"), "up": Column(group="in"), "activation": Activation("in"), "down": "row"}
PLAIN = {"widen": "column", "narrow": "row"}


@dataclass(frozen=True)
class Pair:
    """The same module unsharded and sharded, both run forward and backward on the same numbers."""

    dense: nn.Module
    model: nn.Module
    mesh: Mesh

    def compare(self, x: Tensor, grad: Tensor, **tolerance: float) -> Trace:
        """One pass over both, and what was traced in that over the sharded one."""
        self.model.zero_grad()
        self.dense.zero_grad()
        x_dense = x.clone().requires_grad_()
        x_shard = shard_tokens(x, self.mesh).detach().requires_grad_()
        with record() as trace:
            y = self.model(x_shard)
            y.backward(shard_tokens(grad, self.mesh).detach())
        y_dense = self.dense(x_dense)
        y_dense.backward(grad)
        check(gather_tokens(y.detach(), self.mesh), y_dense, tolerance)
        assert x_shard.grad is not None
        assert x_dense.grad is not None
        check(gather_tokens(x_shard.grad, self.mesh), x_dense.grad, tolerance)
        for name, param in self.dense.named_parameters():
            own = self.model.get_parameter(name).grad
            assert own is not None, name
            assert param.grad is not None, name
            check(gather_tensor(own, ownership_of(self.model)[name], self.mesh), param.grad, tolerance)
        return trace

    def derive_contract(self, num_tokens: int) -> list[Collective]:
        """What one pass of so many tokens has to issue."""
        owners = ownership_of(self.model)
        setting = Setting(1, num_tokens, self.mesh.tp.degree, self.mesh.tp.rank, dtype="float64")
        is_gated = "gate.weight" in owners
        columns = [
            build_linear_parameters(owners, {}, name, ("F", "D"))
            for name in (("gate", "up") if is_gated else ("widen",))
        ]
        entry = derive_column_group(setting, columns)
        exit = derive_row(setting, build_linear_parameters(owners, {}, "down" if is_gated else "narrow", ("D", "F")))
        steps = (*entry.forward, *exit.forward, *exit.backward, *entry.backward)
        return [step.collective for step in steps if isinstance(step, Move)]


def check(actual: Tensor, expected: Tensor, tolerance: dict[str, float]) -> None:
    assert torch.allclose(actual, expected, **tolerance) if tolerance else torch.equal(actual, expected)


def draw(*shape: int, seed: int) -> Tensor:
    """Small integers: exact in any order of sums, so that comparisons of them are of bits."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def build_pair(build: Callable[[], nn.Module], mesh: Mesh, overlap: OverlapConfig) -> Pair:
    """Float64, filled with the same integers on every rank."""
    dense, model = (build().to(mesh.device, torch.float64) for _ in range(2))
    with torch.no_grad():
        for seed, (param, other) in enumerate(zip(dense.parameters(), model.parameters(), strict=True)):
            other.copy_(param.copy_(draw(*param.shape, seed=seed)))
    parallelize(model, mesh, Plan(PLAIN if isinstance(dense, Plain) else GATED), overlap=overlap)
    return Pair(dense, model, mesh)
