"""What every transport offers: a session per tensor that moves, with a method per kind of step.

A session lives for one run of a program. Rows are moved as they are: `[T, width]`, contiguous, cut along dim 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.comm.mesh import Axis
from plait.schedule.piece import Piece
from plait.schedule.step import Add, Collect, Flow, Flush, Message, Method, Recv, Send, Step, Wait


@dataclass(frozen=True)
class Capability:
    """What a transport can do, whatever the machine.

    Attributes:
        device_types: where its tensors may be.
        methods: the methods it can execute.
        needs_one_host: whether all ranks of an axis have to be on one host.
    """

    name: str
    device_types: frozenset[str]
    methods: frozenset[Method]
    needs_one_host: bool = False


class Session(Protocol):
    """One tensor on its way."""

    def recv(self, message: Message) -> None:
        """Make room for a message."""

    def send(self, message: Message) -> None:
        """Set off with a message; its rows must not change before `flush`."""

    def wait(self, message: Message) -> None:
        """Return when the message has arrived."""

    def flush(self) -> None:
        """Return when everything sent has left."""

    def collect(self) -> None:
        """Do all of it at once, as the library does."""


class GatherSession(Session, Protocol):
    """A tensor that is brought together."""

    full: Tensor
    """`[T, width]`: the own rows at once, others when their messages have arrived. Not to be used after the run where
    the transport keeps it (`Transport.keeps_memory`)."""


class ReduceSession(Session, Protocol):
    """Addends that are brought together and summed."""

    partial: Tensor
    """`[T, width]`, where the GEMM puts its rows."""
    total: Tensor
    """The result: the own rows of a reduce-scatter, all rows of an all-reduce. The caller's to keep."""

    def add(self, piece: Piece, ranks: tuple[int, ...]) -> None:
        """Sum the addends of `ranks` in that order, the own one from `partial`.

        The sum goes to `total` where this rank owns the piece, else it is what this rank sends of the piece. It is
        carried in the axis's `reduce_dtype`.
        """


class Transport(Protocol):
    """A way between the ranks of one axis."""

    capability: Capability
    axis: Axis
    keeps_memory: bool
    """Whether `GatherSession.full` is memory of the transport, overwritten by later runs."""

    def open_gather(self, flow: Flow, x_shard: Tensor, label: str) -> GatherSession:
        """Begin to gather `x_shard`, the own rows."""

    def open_reduce(
        self, flow: Flow, width: int, dtype: torch.dtype, device: torch.device, label: str
    ) -> ReduceSession:
        """Begin to reduce rows of `width` elements in `dtype`."""


# A small block takes hardly longer than its steps: `match` would look at one kind after the other, each time.
TAKE: dict[type[Step], Callable[[Mapping[str, Any], Any], None]] = {
    Recv: lambda sessions, step: sessions[step.message.tensor].recv(step.message),
    Send: lambda sessions, step: sessions[step.message.tensor].send(step.message),
    Wait: lambda sessions, step: sessions[step.message.tensor].wait(step.message),
    Add: lambda sessions, step: sessions[step.tensor].add(step.piece, step.ranks),
    Flush: lambda sessions, step: sessions[step.tensor].flush(),
    Collect: lambda sessions, step: sessions[step.tensor].collect(),
}
"""How a step that moves something is taken, with the sessions by tensor."""
