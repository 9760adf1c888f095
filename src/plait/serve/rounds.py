"""The rounds of a server: in each, all ranks learn what came in, and take the same step of the batch."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.comm.agree import share
from plait.comm.mesh import Mesh
from plait.generate.request import Capacity, Event, Request
from plait.serve.desk import Cancel, Desk
from plait.serve.metrics import Metrics

HEARTBEAT_S = 0.5
"""An idle server makes rounds too: they find ranks that died, and keep the others from timing out."""


class Batch(Protocol):
    """What is served: `plait.generate.batch.ContinuousBatch`."""

    @property
    def capacity(self) -> Capacity:
        """What the model takes."""

    @property
    def num_running(self) -> int:
        """Sequences that hold a place."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""

    def step(self, arrivals: Sequence[Request] = (), cancelled: Collection[str] = ()) -> list[Event]:
        """Bring everything forward by a token at most."""


@dataclass(frozen=True)
class Round:
    """What rank 0 tells the others at the beginning of a round, and they it."""

    arrivals: tuple[Request, ...] = ()
    cancelled: tuple[str, ...] = ()
    is_last: bool = False
    is_asked_to_stop: bool = False
    """Whether the rank was asked to stop: each may be, by a launcher that is not ours."""


class Part(Protocol):
    """What a rank has to do beside the step."""

    def begin(self) -> Round:
        """What it has to tell."""

    def hear(self, is_asked_to_stop: bool) -> None:
        """Whether any rank was asked to stop."""

    def end(self, events: list[Event]) -> None:
        """What the step brought."""


def make_rounds(batch: Batch, part: Part, mesh: Mesh) -> None:
    """Make rounds until rank 0 says that one is the last. Every rank has to enter.

    Raises:
        TransportError: a rank did not come to a round, or the HTTP side of rank 0 is gone.
    """
    is_last = False
    while not is_last:
        rounds = share(part.begin(), mesh)
        part.hear(any(each.is_asked_to_stop for each in rounds))
        told = rounds[0]
        part.end(batch.step(told.arrivals, told.cancelled))
        is_last = told.is_last


class Follower:
    """The part of all ranks but the first."""

    def __init__(self, is_asked_to_stop: Callable[[], bool]) -> None:
        self._is_asked_to_stop = is_asked_to_stop

    def begin(self) -> Round:
        return Round(is_asked_to_stop=self._is_asked_to_stop())

    def hear(self, is_asked_to_stop: bool) -> None:
        pass

    def end(self, events: list[Event]) -> None:
        pass


class Leader:
    """The part of rank 0: takes from the desk what came in, and hands out what each step brought.

    When asked to stop it takes in nothing more, lets everything under way finish for `grace_s`, and cancels the rest.
    """

    def __init__(
        self,
        desk: Desk,
        batch: Batch,
        metrics: Metrics,
        grace_s: float,
        is_asked_to_stop: Callable[[], bool],
        on_stop: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._batch = batch
        self._metrics = metrics
        self._grace_s = grace_s
        self._is_asked_to_stop = is_asked_to_stop
        self._on_stop = on_stop
        self._active: dict[str, None] = {}
        """Ids of what has not ended, in the order in which it came."""
        self._deadline_s: float | None = None
        """When the grace is over; None before a stop."""

    def begin(self) -> Round:
        is_idle = not self._active and self._deadline_s is None
        orders = self._desk.take(HEARTBEAT_S if is_idle else 0.0)
        arrivals = tuple(order for order in orders if isinstance(order, Request))
        self._active.update((request.id, None) for request in arrivals)
        cancelled = tuple(order.request_id for order in orders if isinstance(order, Cancel))
        is_over = self._deadline_s is not None and time.monotonic() >= self._deadline_s
        return Round(
            arrivals,
            tuple(self._active) if is_over else cancelled,
            is_last=self._deadline_s is not None and not self._active,
            is_asked_to_stop=self._is_asked_to_stop(),
        )

    def hear(self, is_asked_to_stop: bool) -> None:
        if is_asked_to_stop and self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s
            self._desk.stop()
            self._on_stop()

    def end(self, events: list[Event]) -> None:
        for event in events:
            if event.finish_reason is not None:
                del self._active[event.request_id]
        self._metrics.show_load(self._batch.num_waiting, self._batch.num_running)
        self._desk.deliver(events)
