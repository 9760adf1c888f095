"""The batch `[B, S]` of the forward pass under way, and what stands for it where its tokens are cut."""

from typing import Any

import torch
from torch import Tensor

from plait.comm.autograd import redistribute
from plait.comm.mesh import Mesh
from plait.errors import ShardingError
from plait.parallel.tokens import enter_tokens
from plait.sharding import Invariant, Shard, Split


class WholeBatch:
    """In all-reduce mode every rank has `[B, S, D]` everywhere.

    Attributes:
        is_cut: whether hidden states that come now are those of own tokens.
        gathers_logits: whether whoever called the model wants all columns of the logits.
        is_in_model: whether a causal language model is being called, and not its base alone.
        keeps_all: whether the head is to see the hidden states of all tokens.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.is_cut = False
        self.gathers_logits = False
        self.is_in_model = False
        self.keeps_all = True

    def enter(self, x: Tensor) -> Tensor:
        """`[B, S, D]`, the same on every rank, -> what goes from layer to layer."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The way back."""
        return x

    def remember(self, x: Tensor) -> Tensor:
        """`x`; when its gradient comes, this batch is the one under way again."""
        return x

    def flatten(self, x: Tensor) -> Tensor:
        """What goes from layer to layer, as linears take it."""
        return x

    def inside(self, x: Tensor) -> Tensor:
        """What a linear gives to the inside of a region, as modules there see it: `[B, S, F]`."""
        return x

    def outside(self, x: Tensor) -> Tensor:
        """What a linear gives to what is behind a region."""
        return x


class CutBatch(WholeBatch):
    """Under sequence parallelism layers hand own tokens to each other, `[1, T/tp, D]`; a region sees `[B, S, F/tp]`.

    Attributes:
        shape: `(B, S)` of the batch.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.shape: tuple[int, int] = (0, 0)

    def enter(self, x: Tensor) -> Tensor:
        """Take own tokens; backward gathers.

        Raises:
            ShardingError: no batch of sequences.
        """
        if x.dim() != 3:
            raise ShardingError(
                f"the first layer got hidden states {list(x.shape)}, where sequence parallelism takes [B, S, D]",
                hint="give input_ids [B, S] or inputs_embeds [B, S, D]",
            )
        self.shape = (x.shape[0], x.shape[1])
        split = enter_tokens(x.shape[:2].numel(), self.mesh)
        self.is_cut = True
        own = redistribute(x.flatten(0, 1), self.mesh.tp, Invariant(), Shard(0), split=split, label="enter")
        return own.unsqueeze(0)

    def leave(self, x: Tensor) -> Tensor:
        """Gather the tokens; backward takes own ones."""
        if not self.is_cut:
            return x
        self.is_cut = False
        whole = redistribute(x.flatten(0, -2), self.mesh.tp, Shard(0), Invariant(), split=self._split, label="leave")
        return whole.unflatten(0, self.shape)

    def remember(self, x: Tensor) -> Tensor:
        return _Remember.apply(x, self) if torch.is_grad_enabled() and x.requires_grad else x

    def flatten(self, x: Tensor) -> Tensor:
        return x.flatten(0, -2)

    def inside(self, x: Tensor) -> Tensor:
        return x.unflatten(0, self.shape)

    def outside(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def resume(self, shape: tuple[int, int], split: Split) -> None:
        """Be under way again."""
        self.shape, self.mesh.tokens = shape, split

    @property
    def _split(self) -> Split:
        assert self.mesh.tokens is not None
        return self.mesh.tokens


class _Remember(torch.autograd.Function):
    """Identity behind the layers: their backward, and what it computes again, is of the batch that went through here.

    Between a forward and its backward there may have been another forward, of other sequences.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: CutBatch) -> Tensor:
        ctx.batch, ctx.shape, ctx.split = batch, batch.shape, batch._split
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.batch.resume(ctx.shape, ctx.split)
        return grad, None
