"""Computing a block, or part of it, again in backward instead of keeping what that needs (Chen et al.,
arXiv:1604.06174; the core of attention alone: Korthikanti et al., arXiv:2205.05198).

It stands on torch's checkpoint without reentrant autograd. What that does not know is what a forward pass here goes by
beside its arguments: where in the run its tokens are, and how they are cut. Other micro-batches may have come between,
so that is noted in forward and put back while the module is computed again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.comm.mesh import Mesh
from plait.contract.context.sequences import Sequences
from plait.parallel.dropout import KeyedDropout
from plait.parallel.linear import RowParallelLinear
from plait.sharding import Split


def apply_recompute(block: nn.Module, mesh: Mesh, *, what: str = "", last: str | None = None) -> None:
    """Let the module `what` of `block` keep its inputs alone, and be computed again when backward comes to it.

    `last` is the path of a linear in it whose sum is all that is left to do but what keeps nothing of it, as it leaves
    by the residual stream: that sum is there, as the next block keeps it, and is neither taken again nor moved.

    moves    in backward, what forward moves, but for the sum of `last`
    """
    module = block.get_submodule(what)
    end = None if last is None else block.get_submodule(last)
    module.forward = Again(
        module.forward,
        mesh,
        tuple(inside for inside in block.modules() if isinstance(inside, KeyedDropout)),
        end if isinstance(end, RowParallelLinear) else None,
    )


@dataclass(frozen=True)
class Place:
    """What a forward pass goes by beside its arguments."""

    tokens: Split | None
    sequences: Sequences | None
    first_tokens: tuple[int | None, ...]


@dataclass(eq=False)
class Again:
    """The forward of a module that is computed again in backward.

    Attributes:
        compute: the module's own forward.
        dropouts: those it may read.
        last: the linear that keeps its input without being computed.
    """

    compute: Callable[..., Any]
    mesh: Mesh
    dropouts: tuple[KeyedDropout, ...]
    last: RowParallelLinear | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; nothing is kept but the arguments, where autograd looks on."""
        if not torch.is_grad_enabled():
            return self.compute(*args, **kwargs)
        return checkpoint(
            self.compute,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn from a generator
            context_fn=partial(self._note, self.read_place()),
            # To stop where the last tensor is kept would leave what modules hold for the rest of their forward.
            early_stop=self.mesh.tp.degree == 1,
            **kwargs,
        )

    def read_place(self) -> Place:
        """That of the pass under way."""
        return Place(self.mesh.tokens, self.mesh.sequences, tuple(dropout.first_token for dropout in self.dropouts))

    def put_place(self, place: Place) -> None:
        """Make it that of the pass under way."""
        self.mesh.tokens, self.mesh.sequences = place.tokens, place.sequences
        for dropout, first_token in zip(self.dropouts, place.first_tokens, strict=True):
            dropout.first_token = first_token

    def _note(self, place: Place) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _Back(self, place)


class _Back:
    """While it lasts, the module is at the place where its forward was."""

    def __init__(self, again: Again, place: Place) -> None:
        self._again, self._then = again, place
        self._now: Place | None = None

    def __enter__(self) -> None:
        self._now = self._again.read_place()
        self._again.put_place(self._then)
        if self._again.last is not None:
            self._again.last.is_only_kept = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._now is not None
        self._again.put_place(self._now)
        self._now = None
        if self._again.last is not None:
            self._again.last.is_only_kept = False
