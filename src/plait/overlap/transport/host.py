"""Messages over gloo: its threads move them, and the host waits."""

import time
from collections import defaultdict
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from plait.comm import trace
from plait.comm.collectives import build_transport_error
from plait.comm.mesh import Axis, timeout_of
from plait.errors import TransportError
from plait.schedule.step import Message


class _OnTheWay:
    """What has been issued and not yet been waited for, in one process group.

    A Work that is dropped takes its buffer along, and the peer then waits for ever; so they are kept, also those of a
    run that failed.
    """

    def __init__(self) -> None:
        self.recvs: dict[int, tuple[dist.Work, Message, Tensor]] = {}
        self.sends: defaultdict[str, list[tuple[dist.Work, Message, Tensor]]] = defaultdict(list)


_on_the_way: "WeakKeyDictionary[dist.ProcessGroup, _OnTheWay]" = WeakKeyDictionary()


class HostLink:
    """Point to point over a process group on the CPU. The tag of a message is its round."""

    def __init__(self, axis: Axis) -> None:
        assert axis.group is not None, axis
        # The methods of the group itself: `dist.isend` and `dist.irecv` check so much that they take twice as long.
        self._group = axis.group
        self._timeout = timeout_of(axis.group)
        self._issued = _on_the_way.setdefault(axis.group, _OnTheWay())

    def check_idle(self, ahead: str | None = None) -> None:
        left = [message for _, message, _ in self._issued.recvs.values()]
        left += [message for sends in self._issued.sends.values() for _, message, _ in sends]
        left = [message for message in left if message.tensor != ahead]
        if left:
            raise TransportError(
                f"an earlier run was left in the middle: {', '.join(map(str, left))} may still come",
                hint="start new ranks: what comes late would be taken for what is new",
            )

    def recv(self, message: Message, room: Tensor) -> None:
        try:
            work = self._group.recv([room], message.source, message.round)
        except RuntimeError as error:
            raise build_transport_error(error, str(message)) from error
        self._issued.recvs[message.round] = (work, message, room)

    def send(self, message: Message, rows: Tensor) -> None:
        try:
            work = self._group.send([rows], message.target, message.round)
        except RuntimeError as error:
            raise build_transport_error(error, str(message)) from error
        self._issued.sends[message.tensor].append((work, message, rows))

    def wait(self, message: Message) -> None:
        self._finish(self._issued.recvs[message.round][0], message)
        del self._issued.recvs[message.round]

    def flush(self, tensor: str) -> None:
        sends = self._issued.sends[tensor]
        while sends:
            work, message, _ = sends[0]
            self._finish(work, message)
            del sends[0]

    def _finish(self, work: dist.Work, message: Message) -> None:
        start = time.perf_counter()
        try:
            # Without a timeout of its own, a message has the one its group was started with.
            work.wait(self._timeout) if self._timeout is not None else work.wait()
        except RuntimeError as error:
            raise build_transport_error(error, str(message)) from error
        trace.note_wait(time.perf_counter() - start)
