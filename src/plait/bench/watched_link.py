"""Messages over gloo whose ends are noted.

When a transfer ends cannot be asked, only waited for, and only once. So a thread for each peer and direction waits for
the messages in their order, notes when each is through, and tells the host, which waits for the thread instead.
"""

from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from plait.comm.collectives import build_transport_error
from plait.comm.mesh import Axis, timeout_of
from plait.errors import TransportError
from plait.schedule.step import Message

Direction = Literal["send", "recv"]


class Transfer:
    """One message at one of its ends.

    Attributes:
        issued_s: when this side was ready for it.
        end_s: when all of it had been handed to the network, or had come.
    """

    def __init__(self, message: Message, direction: Direction, rows: Tensor) -> None:
        self.message = message
        self.direction = direction
        self.issued_s = self.end_s = 0.0
        self._rows = rows
        self._is_through = Event()
        self._error: RuntimeError | None = None

    def watch(self, work: dist.Work, wait: Callable[[dist.Work], Any]) -> None:
        """Wait for it, on a thread."""
        try:
            wait(work)
        except RuntimeError as error:
            self._error = error
        self.end_s = perf_counter()
        self._is_through.set()

    def finish(self) -> None:
        """Wait for it, on the host."""
        self._is_through.wait()
        if self._error is not None:
            raise build_transport_error(self._error, str(self.message)) from self._error


class WatchedLink:
    """As the link over gloo, with a thread for each peer and direction.

    Attributes:
        transfers: all of them, in the order in which they were issued.
    """

    def __init__(self, axis: Axis) -> None:
        assert axis.group is not None, axis
        self._group = axis.group
        self._timeout = timeout_of(axis.group)
        self._watchers: dict[tuple[Direction, int], SimpleQueue[tuple[Transfer, dist.Work]]] = {}
        self._recvs: dict[int, Transfer] = {}
        self._sends: defaultdict[str, list[Transfer]] = defaultdict(list)
        self.transfers: list[Transfer] = []

    def check_idle(self, ahead: str | None = None) -> None:
        recvs = [each for each in self._recvs.values() if each.message.tensor != ahead]
        if recvs or any(sends for tensor, sends in self._sends.items() if tensor != ahead):
            raise TransportError(f"an earlier run was left in the middle: {len(recvs)} messages may still come")

    def recv(self, message: Message, room: Tensor) -> None:
        self._recvs[message.round] = transfer = Transfer(message, "recv", room)
        self._hand_over(transfer, self._group.recv([room], message.source, message.round), message.source)

    def send(self, message: Message, rows: Tensor) -> None:
        transfer = Transfer(message, "send", rows)
        self._sends[message.tensor].append(transfer)
        self._hand_over(transfer, self._group.send([rows], message.target, message.round), message.target)

    def wait(self, message: Message) -> None:
        self._recvs.pop(message.round).finish()

    def flush(self, tensor: str) -> None:
        for transfer in self._sends.pop(tensor, ()):
            transfer.finish()

    def _hand_over(self, transfer: Transfer, work: dist.Work, peer: int) -> None:
        transfer.issued_s = perf_counter()
        self.transfers.append(transfer)
        key = (transfer.direction, peer)
        if key not in self._watchers:
            self._watchers[key] = SimpleQueue()
            Thread(target=self._watch, args=(self._watchers[key],), daemon=True).start()
        self._watchers[key].put((transfer, work))

    def _watch(self, queue: "SimpleQueue[tuple[Transfer, dist.Work]]") -> None:
        while True:
            transfer, work = queue.get()
            transfer.watch(work, self._wait)

    def _wait(self, work: dist.Work) -> None:
        work.wait(self._timeout) if self._timeout is not None else work.wait()
