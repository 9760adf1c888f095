"""Linears that hold several, and those that hold their weight transposed, taken apart into `nn.Linear`s.

What is computed stays the same. A linear of its own can be cut by its own heads or columns, where every rank of a cut
of the whole would have a piece of one part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.hf.stored import Stored
from plait.sharding import Interval


@dataclass(frozen=True)
class Part:
    """Output features of a packed linear: `features` of them, named for what they are."""

    name: str
    features: int


class PackedLinear(nn.Module):
    """Linears that read one input and whose outputs are handed on in one tensor.

    x    [B, S, D] -> [B, S, F]    F is the sum of the parts' features; of a rank's own ones where they are cut
    """

    def __init__(self, parts: dict[str, nn.Linear]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply each, side by side. Named as in nn.Linear."""
        return torch.cat([part(input) for part in self.children()], dim=-1)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear holds its weight as `[in, out]`: transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether this is one matrix multiplication, of either orientation."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """`[out, in]` of a linear of either orientation."""
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


def take_apart(name: str, module: nn.Module, parts: tuple[Part, ...]) -> tuple[nn.Module, dict[str, Stored]]:
    """The linear (or, of several parts, the linears) that `module` is, on the same memory, and where each is stored."""
    stored: dict[str, Stored] = {}
    if not parts:
        linear = _take(name, module, Interval(0, linear_shape(module)[0]), name, stored)
        return linear, stored
    linears, start = {}, 0
    for part in parts:
        rows = Interval(start, start + part.features)
        linears[part.name] = _take(name, module, rows, f"{name}.{part.name}", stored)
        start = rows.stop
    return PackedLinear(linears).train(module.training), stored


def _take(name: str, module: nn.Module, rows: Interval, path: str, stored: dict[str, Stored]) -> nn.Linear:
    weight, bias = module.get_parameter("weight"), dict(module.named_parameters()).get("bias")
    is_turned, is_part = is_transposed(module), len(rows) < linear_shape(module)[0]
    dim = 1 if is_turned else 0
    own = weight.detach().narrow(dim, rows.start, len(rows))
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.out_features, linear.in_features = len(rows), linear_shape(module)[1]
    linear.weight = nn.Parameter(own.t() if is_turned else own, requires_grad=weight.requires_grad)
    interval = rows if is_part else None
    stored[f"{path}.weight"] = Stored(
        f"{name}.weight", tuple(weight.shape), dim if is_part else None, interval, is_transposed=is_turned
    )
    if bias is not None:
        own_bias = bias.detach().narrow(0, rows.start, len(rows))
        linear.bias = nn.Parameter(own_bias, requires_grad=bias.requires_grad)
        stored[f"{path}.bias"] = Stored(f"{name}.bias", tuple(bias.shape), 0 if is_part else None, interval)
    return linear
