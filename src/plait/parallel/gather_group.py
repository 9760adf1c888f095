"""Gather groups: column linears that read the same input share one gather forward and one reduction backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.linear import ColumnParallelLinear, run_column_group
from plait.parallel.region.arguments import Arguments, map_hidden_states
from plait.parallel.region.column import ColumnGroup, Outputs


class GatherGroup:
    """Columns under one parent module, run together when the first of them is called with the input they share.

    What the parent does with its input otherwise (a norm in front, a residual sum behind) stays outside the region. An
    output waits for its member, and what is made of it for the activation, no longer than the parent's forward lasts.
    """

    def __init__(self, parent: nn.Module, members: Sequence[ColumnParallelLinear], group: ColumnGroup) -> None:
        self.parent = parent
        self.members = tuple(members)
        self.group = group
        self.x: Tensor | None = None
        """What the outputs belong to: the members' input, or in an entered region what was gathered."""
        self.outputs: dict[ColumnParallelLinear, Tensor] = {}
        self.activated: tuple[tuple[Tensor, ...], tuple[int, ...], Tensor] | None = None
        """All outputs, how often each had been written to, and their activation."""
        self.is_entered = False
        for member in members:
            member.group = self
        if group.activation is not None:
            group.activation.group = self
        # Also on the way in, for what a forward that raised has left: a hook that is called even then would have every
        # layer compiled for itself, as compiled graphs are guarded by its number.
        parent.register_forward_pre_hook(self._forget)
        parent.register_forward_hook(self._forget)

    def enter_with_parent(self) -> None:
        """Run already when the parent is entered, for a forward that reads its input's shape before projecting.

        The first tensor that the parent is called with is gathered once, and the parent's forward sees the gathered
        tensor, a further differentiable output. Whatever else it does with that must end in a row linear, or its
        gradient would be summed tp times.
        """
        self.parent.register_forward_pre_hook(self._enter, with_kwargs=True)

    def compute(self, member: ColumnParallelLinear, x: Tensor) -> Tensor:
        """The output of `member` for `x`."""
        if self.is_entered:
            return self.outputs[member] if x is self.x else member.multiply(x)
        if x is not self.x or member not in self.outputs:
            self._run(x, keeps_full=False)
            self.x = x
        return self.outputs.pop(member)

    def find_activated(self, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """The activation of `inputs`, if they are the outputs of the members, in order."""
        if self.activated is None:
            return None
        outputs, versions, activated = self.activated
        is_same = len(inputs) == len(outputs) and all(x is y for x, y in zip(inputs, outputs, strict=True))
        if not is_same or versions != _list_versions(outputs):
            return None
        # Once only: who is given it may write to it.
        self.activated = None
        return activated

    def multiply(self, x: Tensor, *, keeps_full: bool) -> Outputs:
        """Gather `x` and multiply it by every member's weight."""
        return run_column_group(x, self.group, self.members, keeps_full=keeps_full)

    def _run(self, x: Tensor, *, keeps_full: bool) -> Tensor | None:
        given = self.multiply(x, keeps_full=keeps_full)
        outputs = tuple(given.members)
        self.outputs = dict(zip(self.members, outputs, strict=True))
        self.activated = None
        # A compiled graph has its own order of writes, and inference counts none.
        is_counted = torch.compiler.is_compiling() or not outputs[0].is_inference()
        if given.activated is not None and is_counted:
            self.activated = (outputs, _list_versions(outputs), given.activated)
        return given.x_full

    def _enter(self, parent: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        def gather(x: Tensor) -> Tensor:
            self.x = self._run(x, keeps_full=True)
            assert self.x is not None, self.group.entry.name
            self.is_entered = True
            return self.x

        return map_hidden_states(gather, args, kwargs)

    def _forget(self, *_: Any) -> None:
        self.x, self.outputs, self.activated, self.is_entered = None, {}, None, False


def _list_versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each was written to."""
    return () if torch.compiler.is_compiling() else tuple(tensor._version for tensor in tensors)
