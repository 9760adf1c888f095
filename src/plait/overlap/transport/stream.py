"""Messages over NCCL: enqueued on a stream of their own, and waited for by the stream that computes.

NCCL has no tags and each of its operations occupies the stream until the other side has come, so every rank has to
issue all messages in one order, that of their rounds, and those of one round together: a receive is held back until its
round is issued. The host waits for nothing. What a run exposes is therefore not in the host's time, but in the gaps of
the computing stream, which `Stalls` measures.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.collectives import build_transport_error
from plait.comm.mesh import Axis
from plait.errors import TransportError
from plait.schedule.step import Message


class Stalls:
    """Pairs of events around each wait of the computing stream."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def read_total_s(self) -> float:
        """How long the computing stream stood still; the host waits until it has passed the last wait."""
        if self.pairs:
            self.pairs[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in self.pairs) / 1000


class StreamLink:
    """Point to point between devices.

    The first exchange of a group sets up its communicator and takes all ranks, which that of `overlap.agree` is.
    References are kept until the computing stream has been told to wait, so its later allocations come after the use of
    what they take over; `record_stream` is not needed for that.

    Attributes:
        stalls: where to put events around waits, while somebody measures.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        assert axis.group is not None, axis
        self._group = axis.group
        # A module as torch.cuda; that of the CPU has streams which do nothing, enough to test the order over gloo.
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream()
        self._held: dict[int, tuple[Message, Tensor]] = {}
        self._issued: dict[int, tuple[Message, Tensor, Any]] = {}
        """Receives, where they go, and the events after them, by round."""
        self._sent: defaultdict[str, list[tuple[Message, Tensor, Any]]] = defaultdict(list)
        self._room_event: Any = None
        self._last_round = -1
        self.stalls: Stalls | None = None

    def check_idle(self, ahead: str | None = None) -> None:
        left = [message for message, _ in self._held.values()]
        left += [message for message, _, _ in self._issued.values()]
        left += [message for sent in self._sent.values() for message, _, _ in sent]
        left = [message for message in left if message.tensor != ahead]
        if left:
            raise TransportError(
                f"an earlier run was left in the middle: {', '.join(map(str, left))} may still come",
                hint="start new ranks: what comes late would be taken for what is new",
            )

    def recv(self, message: Message, room: Tensor) -> None:
        # What had this memory before may still be in use by what has been enqueued so far.
        self._room_event = self._streams.current_stream().record_event()
        self._held[message.round] = (message, room)

    def send(self, message: Message, rows: Tensor) -> None:
        self._issue_before(message.round)
        self._stream.wait_stream(self._streams.current_stream())
        event = self._issue(message.round, message, rows)
        self._sent[message.tensor].append((message, rows, event))

    def wait(self, message: Message) -> None:
        self._issue_before(message.round + 1)
        _, _, event = self._issued.pop(message.round)
        self._let_compute_wait(event)

    def flush(self, tensor: str) -> None:
        if sent := self._sent.pop(tensor, None):
            self._let_compute_wait(sent[-1][2])
        if not (self._held or self._issued or self._sent):
            self._last_round = -1

    def issue_held(self) -> None:
        """Issue every receive that is held back, before anything else is enqueued between the ranks."""
        self._issue_before(max(self._held, default=-1) + 1)

    def _issue_before(self, end: int) -> None:
        """Issue the receives held from rounds before `end`; in those rounds this rank sends nothing."""
        for number in sorted(number for number in self._held if number < end):
            self._stream.wait_event(self._room_event)
            self._issue(number)

    def _issue(self, number: int, outgoing: Message | None = None, rows: Tensor | None = None) -> Any:
        """Issue a round: the receive of it, if there is one, together with what is sent; the event at its end."""
        assert number > self._last_round, (number, self._last_round, str(outgoing))
        self._last_round = number
        operations = []
        incoming, room = self._held.pop(number, (None, None))
        if incoming is not None:
            assert room is not None
            operations.append(dist.P2POp(dist.irecv, room, group=self._group, group_peer=incoming.source))
        if outgoing is not None:
            assert rows is not None
            operations.append(dist.P2POp(dist.isend, rows, group=self._group, group_peer=outgoing.target))
        try:
            with self._streams.stream(self._stream):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                event = self._stream.record_event()
        except RuntimeError as error:
            what = " and ".join(str(message) for message in (incoming, outgoing) if message is not None)
            raise build_transport_error(error, what) from error
        if incoming is not None:
            assert room is not None
            self._issued[number] = (incoming, room, event)
        return event

    def _let_compute_wait(self, event: Any) -> None:
        computing = self._streams.current_stream()
        if self.stalls is None:
            computing.wait_event(event)
            return
        start, end = (self._streams.Event(enable_timing=True) for _ in range(2))
        start.record(computing)
        computing.wait_event(event)
        end.record(computing)
        self.stalls.pairs.append((start, end))
