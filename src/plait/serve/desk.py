"""Where the HTTP thread and the scheduler's meet: sequences are handed in, their events come back."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

from plait.errors import TransportError
from plait.generate.request import Capacity, Event, Request
from plait.serve.form.refusal import Refusal, fail, refuse_for_now
from plait.serve.metrics import Metrics


class State(StrEnum):
    """What the server can do."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


ArgumentT = TypeVar("ArgumentT")

_REFUSALS = {
    State.LOADING: "the model is being loaded",
    State.STOPPING: "the server is shutting down",
    State.FAILED: "the server has failed and ends",
}


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for this sequence any more."""

    request_id: str


@dataclass(frozen=True)
class Wake:
    """There may be something to do."""


Order = Request | Cancel | Wake


class Reply:
    """What comes back for one HTTP request: the events of its sequences. For the thread of the event loop.

    Events wait here until they are read: at most as many as the request may have tokens, whatever its client does, and
    the scheduler never waits for a reader.
    """

    def __init__(self, num_sequences: int) -> None:
        self._num_open = num_sequences
        self._unread: list[tuple[int, Event]] = []
        self._failure: Refusal | None = None
        self._news = asyncio.Event()

    def put(self, index: int, event: Event) -> None:
        """Add an event of sequence `index`."""
        if event.finish_reason == "failed":
            self.end(fail("the model gave logits that are not finite for this request"))
            return
        if event.finish_reason == "cancelled":
            self.end(refuse_for_now("the server is shutting down: the request was not finished", State.STOPPING))
            return
        self._unread.append((index, event))
        self._num_open -= event.finish_reason is not None
        self._news.set()

    def end(self, failure: Refusal) -> None:
        """Let the reader raise `failure` after what has come."""
        self._failure = failure
        self._news.set()

    async def read(self) -> list[tuple[int, Event]]:
        """All that has come since, with the index of its sequence, as soon as there is any; empty after the last.

        Raises:
            Refusal: the sequences will not be finished.
        """
        while not self._unread and self._failure is None and self._num_open > 0:
            self._news.clear()
            await self._news.wait()
        unread, self._unread = self._unread, []
        if not unread and self._failure is not None:
            raise self._failure
        return unread


@dataclass
class _Ticket:
    """A sequence that has not ended."""

    reply: Reply
    index: int
    noted_s: float
    """When it was handed in, then when its last token came."""
    has_tokens: bool = False


class Desk:
    """Takes sequences in while the server is ready, up to `max_in_flight` at a time, and hands their events out.

    `submit` and `withdraw` belong to the thread of the event loop, all others to the scheduler's.
    """

    def __init__(self, metrics: Metrics, max_in_flight: int) -> None:
        self.state = State.LOADING
        self.capacity: Capacity | None = None
        """What the model takes, as soon as it is loaded."""
        self.max_in_flight = max_in_flight
        self._metrics = metrics
        self._lock = Lock()
        """Held to change `state` and to hand in, so that nothing is handed in that nobody takes."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: dict[str, _Ticket] = {}
        self._inbox: SimpleQueue[Order] = SimpleQueue()
        self._lost: str | None = None

    # --- the event loop's thread -------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Sequences that were handed in and have not ended."""
        return len(self._tickets)

    def submit(self, requests: Sequence[Request]) -> Reply:
        """Hand in the sequences of one HTTP request, all of them or none.

        Raises:
            Refusal: not now.
        """
        if self.num_in_flight + len(requests) > self.max_in_flight:
            raise refuse_for_now(
                f"{self.num_in_flight} sequences are in flight, and {len(requests)} more would be over the "
                f"{self.max_in_flight} that this server holds",
                "queue_full",
            )
        reply = Reply(len(requests))
        with self._lock:
            self.check_ready()
            self._loop = asyncio.get_running_loop()
            now_s = time.monotonic()
            for index, request in enumerate(requests):
                self._tickets[request.id] = _Ticket(reply, index, now_s)
                self._inbox.put(request)
        return reply

    def check_ready(self) -> None:
        """Raise a Refusal unless sequences are taken in."""
        if self.state is not State.READY:
            raise refuse_for_now(_REFUSALS[self.state], self.state)

    def withdraw(self, reply: Reply) -> None:
        """Nobody reads `reply` any more: let those of its sequences go that have not ended."""
        for request_id, ticket in self._tickets.items():
            if ticket.reply is reply:
                self._inbox.put(Cancel(request_id))

    def lose(self, why: str) -> None:
        """Say that the HTTP side has ended before it was told to."""
        self._lost = why
        self.wake()

    # --- the scheduler's thread --------------------------------------------------------------------------------------

    def open(self, capacity: Capacity) -> None:
        """Take sequences in from now on."""
        with self._lock:
            self.capacity = capacity
            self.state = State.READY

    def stop(self) -> None:
        """Take nothing in any more; what was taken in is still to be taken from here."""
        with self._lock:
            self.state = State.STOPPING

    def wake(self) -> None:
        """Let `take` return. Signal handlers may call it."""
        self._inbox.put(Wake())

    def take(self, patience_s: float) -> list[Order]:
        """What was handed in since, in order, after at most `patience_s` until the first.

        Raises:
            TransportError: the HTTP side is lost.
        """
        orders: list[Order] = []
        with suppress(Empty):
            orders.append(self._inbox.get(timeout=patience_s) if patience_s > 0 else self._inbox.get_nowait())
            while True:
                orders.append(self._inbox.get_nowait())
        if self._lost is not None:
            raise TransportError(f"the HTTP side of the server ended: {self._lost}")
        return orders

    def deliver(self, events: Collection[Event]) -> None:
        """Pass on what a step brought, without waiting for anybody."""
        if events:
            self._call(self._hand_out, events)

    def fail(self) -> None:
        """End everything that is in flight with an error."""
        with self._lock:
            self.state = State.FAILED
        self._call(self._end_all, fail("the server failed before the request was finished"))

    def _call(self, function: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
        if self._loop is not None:  # else nothing was ever handed in
            with suppress(RuntimeError):  # the loop has been closed: nobody reads any more
                self._loop.call_soon_threadsafe(function, argument)

    # --- called on the event loop's thread ---------------------------------------------------------------------------

    def _hand_out(self, events: Collection[Event]) -> None:
        now_s = time.monotonic()
        for event in events:
            ticket = self._tickets[event.request_id]
            self._metrics.count_event(event, now_s - ticket.noted_s, not ticket.has_tokens)
            ticket.noted_s, ticket.has_tokens = now_s, True
            if event.finish_reason is not None:
                del self._tickets[event.request_id]
            ticket.reply.put(ticket.index, event)

    def _end_all(self, failure: Refusal) -> None:
        for ticket in self._tickets.values():
            ticket.reply.end(failure)
            self._metrics.count_end("failed")
        self._tickets.clear()
