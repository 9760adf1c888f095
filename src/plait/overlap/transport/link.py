"""What moves one message: the part of a piecewise transport that knows how ranks are connected."""

from typing import Protocol

from torch import Tensor

from plait.schedule.step import Message


class Link(Protocol):
    """A way to and from the other ranks of an axis. Tensors are contiguous and stay as they are until done."""

    def check_idle(self, ahead: str | None = None) -> None:
        """Raise if an earlier run was left in the middle: what is still on its way would be taken for what is new.

        `ahead` is what the run before has begun on purpose.
        """

    def recv(self, message: Message, room: Tensor) -> None:
        """Let a message come into `room`, from now on."""

    def send(self, message: Message, rows: Tensor) -> None:
        """Set off with a message."""

    def wait(self, message: Message) -> None:
        """Return when the message is in its room."""

    def flush(self, tensor: str) -> None:
        """Return when all that was sent of `tensor` has left."""
