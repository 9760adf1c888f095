"""RMSNorm over features that are cut: the squares are summed over tp, nothing else moves."""

from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.autograd import redistribute
from plait.comm.mesh import Axis, Mesh
from plait.sharding import Invariant, Partial, Replicate, Split


class FeatureParallelNorm(nn.Module):
    """RMSNorm of `F` features of which each rank has its own; its weight is cut with them.

        x_shard    [.., F/tp] -> the same
        weight     [F/tp]

        forward    all_reduce sum [..] over tp
        backward   the same; the gradient of a weight that several ranks hold is all-reduced over them

    Features that several ranks hold (KV heads, where they are fewer than ranks) are counted once.
    """

    def __init__(
        self,
        module: nn.Module,
        weight: nn.Parameter,
        *,
        split: Split,
        mesh: Mesh,
        shared_over: Axis | None,
        name: str,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)) or 0.0)
        self.num_features = split.size
        self.num_holders = len(split.replicas(mesh.tp.rank))
        self.mesh = mesh
        self.shared_over = shared_over
        self.name = name

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise in float32 (float64 where the features are); the weight multiplies there, as in OLMo 2."""
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        squares: Any = x.square().sum(-1, keepdim=True) / self.num_holders
        for source, target in ((Partial(), Invariant()), (Invariant(), Replicate())):
            squares = redistribute(squares, self.mesh.tp, source, target, label=self.name)
        weight: Tensor = self.weight
        if self.shared_over is not None:
            weight = redistribute(weight, self.shared_over, Invariant(), Replicate(), label=self.name)
        return (weight * (x * torch.rsqrt(squares / self.num_features + self.eps))).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """Own features of all."""
        return f"{list(self.weight.shape)} of {self.num_features}"
