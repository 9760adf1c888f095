"""The way of a ring's messages: that of collective GEMMs, with what moved recorded."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.mesh import Axis
from plait.overlap.transport.host import HostLink
from plait.overlap.transport.link import Link
from plait.overlap.transport.stream import StreamLink
from plait.schedule.step import Message

_links: "WeakKeyDictionary[Axis, dict[torch.device, Link]]" = WeakKeyDictionary()


class RecordedLink:
    """Messages of one pass, in the trace under the name of its place."""

    def __init__(self, axis: Axis, device: torch.device, label: str) -> None:
        links = _links.setdefault(axis, {})
        if device not in links:
            links[device] = StreamLink(axis, device) if device.type == "cuda" else HostLink(axis)
        self._link, self._label = links[device], label
        self._rooms: dict[Message, Tensor] = {}
        self._link.check_idle()

    def recv(self, message: Message, room: Tensor) -> None:
        """Let a message come into `room`."""
        self._rooms[message] = room
        self._link.recv(message, room)

    def send(self, message: Message, rows: Tensor) -> None:
        """Set off with a message; `rows` must not change before `flush`."""
        self._link.send(message, rows)
        trace.note_sent(message, rows.nbytes, self._label)

    def wait(self, message: Message) -> Tensor:
        """What has come, when it has."""
        self._link.wait(message)
        room = self._rooms.pop(message)
        trace.note_received(message, room.nbytes, self._label)
        return room

    def flush(self, tensor: str) -> None:
        """Return when all that was sent of `tensor` has left."""
        self._link.flush(tensor)
