"""A block whose linears are quantized, sharded and not, and what both give."""

from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.mesh import Mesh
from plait.config.overlap import OverlapConfig
from plait.config.quantization import QuantizationConfig
from plait.contract.plan import Column, Plan, Row
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.shard import gather_tensor
from plait.parallel.tokens import gather_tokens, shard_tokens
from tests.support.lone_mesh import build_lone_mesh

WIDTH = 64
FEATURES = 160
"""Five blocks of 32: over two or three ranks they are cut unevenly."""

TOKENS = 96
"""Three blocks: over two ranks uneven, over four one has none."""

RECIPES = ("fp8_currentscaling", "fp8_delayedscaling", "mxfp8", "nvfp4")


class Mlp(nn.Module):
    """Two columns that read one input, a product of their outputs, a row."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, FEATURES, bias=bias)
        self.right = nn.Linear(WIDTH, FEATURES, bias=bias)
        self.down = nn.Linear(FEATURES, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.left(x) * self.right(x).tanh())


class Block(nn.Module):
    """Two such, one behind the other."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.mlp = Mlp(bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build_plan(*, sequence_parallel: bool) -> Plan:
    """The roles of `Model`."""
    roles: dict[str, Any] = {
        "layers.*.mlp.left": Column(group="in"),
        "layers.*.mlp.right": Column(group="in"),
        "layers.*.mlp.down": Row(),
    }
    return Plan(roles, sequence_parallel=sequence_parallel)


def build_config(recipe: str, **options: Any) -> QuantizationConfig:
    """The recipe for all blocks."""
    return QuantizationConfig.model_validate({"recipe": recipe, "keep_first": 0, "keep_last": 0, **options})


def build_model(
    mesh: Mesh,
    quantization: QuantizationConfig,
    *,
    sequence_parallel: bool,
    bias: bool = True,
    overlap: OverlapConfig | None = None,
    dtype: torch.dtype = torch.float64,
) -> Model:
    """The same weights each time, in float64: sums over ranks then differ by nothing that quantizers could see."""
    torch.manual_seed(0)
    model = Model(bias=bias).to(dtype)
    plan = build_plan(sequence_parallel=sequence_parallel)
    model = parallelize(model, mesh, plan, overlap=overlap or "disabled", quantization=quantization)
    seed_dropout(model, 3)
    set_dropout_offset(model, 1000)
    return model


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers with a few that are much larger, as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    is_large = torch.rand(*shape, generator=generator) < 0.01
    return torch.where(is_large, 20 * x, x).to(dtype)


def run_whole(model: Model, mesh: Mesh, x: Tensor, grad: Tensor, *, sequence_parallel: bool) -> dict[str, Tensor]:
    """Output, and gradients of the input and of every parameter, whole."""
    x = x.clone().requires_grad_()
    is_cut = sequence_parallel and mesh.tp.degree > 1
    y = gather_tokens(model(shard_tokens(x, mesh)), mesh) if is_cut else model(x)
    y.backward(grad)
    assert x.grad is not None
    ownership = ownership_of(model)
    grads = {
        name: gather_tensor(param.grad, ownership[name], mesh)
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return {"y": y.detach(), "dx": x.grad, **grads}


def run_twin(quantization: QuantizationConfig, x: Tensor, grad: Tensor, *, bias: bool = True) -> dict[str, Tensor]:
    """The same on one rank: what the recipe means."""
    lone = build_lone_mesh(1)
    twin = build_model(lone, quantization, sequence_parallel=False, bias=bias, dtype=x.dtype)
    return run_whole(twin, lone, x, grad, sequence_parallel=False)


def find_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each, relative to the largest number of it."""
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    return {
        name: float((found[name] - each).abs().max() / each.abs().max().clamp(min=1e-30))
        for name, each in wanted.items()
    }
