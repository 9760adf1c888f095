"""Attention over a context axis beside the same attention on one device, which sees a matrix of what sees what."""

from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm.mesh import Axis, build_mesh
from plait.contract.context.attention import ContextMethod
from plait.contract.context.mask import AttentionMask, build_documents
from plait.parallel.context.attention import attend
from plait.parallel.context.context import Context, build_context
from plait.parallel.context.tokens import gather, take_own
from plait.sharding import MeshShape
from plait.sharding.token_order import Order

BATCH, HEAD_WIDTH = 2, 8

MASKS = {
    "causal": AttentionMask(),
    "full": AttentionMask(causal=False),
    "window": AttentionMask(window=4),
    "full window": AttentionMask(causal=False, window=6),
    "documents": AttentionMask(documents=build_documents([[5, 9, 1, 8], [17, 2, 4]])),
    "full documents": AttentionMask(causal=False, documents=build_documents([[5, 9, 1, 8], [17, 2, 4]])),
    "window in documents": AttentionMask(window=5, documents=build_documents([[3, 20], [23]])),
    "padding": AttentionMask(documents=build_documents([[23], [6]])),
    "one row of documents for all": AttentionMask(documents=build_documents([[4, 4, 12]])),
    "nothing seen": AttentionMask(documents=build_documents([[], []])),
}
"""Of 23 tokens, which no degree divides, in two rows."""
SIZE = 23

HEADS = {"multi-head": (4, 4), "grouped": (4, 2), "multi-query": (4, 1)}


@dataclass(frozen=True)
class Case:
    """One attention over the whole sequence."""

    mask: AttentionMask
    num_heads: int = 4
    num_kv_heads: int = 2
    size: int = SIZE
    dtype: torch.dtype = torch.float64
    batch: int = BATCH

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Whole queries, keys, values and gradient of the output, the same on every rank."""
        generator = torch.Generator().manual_seed(7)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        q, k, v, grad = (
            torch.randn(self.batch, n, self.size, HEAD_WIDTH, dtype=torch.float64, generator=generator).to(self.dtype)
            for n in heads
        )
        return q, k, v, grad

    def build_seen(self) -> Tensor:
        """Who sees whom, `[B, S, S]`, pair by pair from the definition."""
        distance = torch.arange(self.size).unsqueeze(1) - torch.arange(self.size)
        seen = torch.ones(self.batch, self.size, self.size, dtype=torch.bool)
        if self.mask.causal:
            seen &= distance >= 0
        if self.mask.window is not None:
            seen &= distance.abs() < self.mask.window
        if self.mask.documents:
            for row in range(self.batch):
                ids = torch.full((self.size,), -1)
                documents = self.mask.documents[row if len(self.mask.documents) > 1 else 0]
                for number, document in enumerate(documents):
                    ids[document.start : document.stop] = number
                seen[row] &= (ids.unsqueeze(1) == ids) & (ids >= 0)
        return seen

    def run_alone(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Output and gradients of q, k and v on one device, in `dtype`; 0 where nothing is seen."""
        q, k, v, grad = (x.to(dtype or self.dtype) for x in self.draw())
        for x in (q, k, v):
            x.requires_grad_()
        seen = self.build_seen()
        sees_any = seen.any(-1)[:, None, :, None]
        # A row that sees nothing is given itself, and its output and gradient are taken away again.
        seen |= torch.eye(self.size, dtype=torch.bool) & ~seen.any(-1, keepdim=True)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1), enable_gqa=True) * sees_any
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]

    def run_sharded(self, context: Context) -> list[Tensor]:
        """The same on the ranks of the context's axis, put together on each."""
        rank, order = context.axis.rank, context.order
        q, k, v, grad = (take_own(x, order, rank, dim=2) for x in self.draw())
        for x in (q, k, v):
            x.requires_grad_()
        y = attend(q, k, v, context, self.mask, label="here")
        grads = torch.autograd.grad(y, (q, k, v), grad)
        return [gather(x, context.axis, order, dim=2) for x in (y, *grads)]


def build_axis(degree: int) -> Axis:
    """All ranks of the world, as a context axis."""
    return replace(build_mesh(MeshShape(tp=degree)).tp, name="cp")


def find_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any element."""
    return max(
        float((a.double() - b.double()).abs().max()) if a.numel() else 0.0 for a, b in zip(found, expected, strict=True)
    )


def list_contexts(axis: Axis, size: int) -> list[Context]:
    """Every method with every order."""
    return [build_context(axis, size, method=method, order=order) for method, order in product(ContextMethod, Order)]
