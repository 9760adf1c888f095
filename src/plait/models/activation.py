"""The activations of the Llama and GPT-2 families."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.parallel.region.activation import PointwiseActivation

_aten = torch.ops.aten


class SwiGLU(PointwiseActivation):
    """`silu(gate) * up` (Shazeer, arXiv:2002.05202). It keeps `gate` and `up`, and computes `silu(gate)` again."""

    num_inputs = 2

    def compute(self, gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return torch.mul(F.silu(gate), up, out=out)

    def compute_gradients(self, grad: Tensor, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        (gate, up), (grad_gate, grad_up) = inputs, outs
        torch.mul(grad, up, out=grad_gate)
        _aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        torch.mul(grad, F.silu(gate), out=grad_up)


class Gelu(PointwiseActivation):
    """`gelu(up)`, of which `approximate="tanh"` is GPT-2's form."""

    num_inputs = 1

    def __init__(self, *, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def compute(self, up: Tensor, *, out: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if out is None:
            return F.gelu(up, approximate=self.approximate)
        activated: Tensor = _aten.gelu.out(up, approximate=self.approximate, out=out)
        return activated

    def compute_gradients(self, grad: Tensor, inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        _aten.gelu_backward.grad_input(grad, inputs[0], approximate=self.approximate, grad_input=outs[0])

    def extra_repr(self) -> str:
        """Which form."""
        return f"approximate={self.approximate!r}"
