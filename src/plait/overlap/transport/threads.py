"""Ranks as threads of one process: every schedule in milliseconds, and with the worst timing a network could have.

A message is copied while its receiver makes room, or when it is waited for, whichever the world chooses. Until it is
copied its room holds no number, and its sender is held in `flush`: rows that are read too early or changed too soon are
seen each time, not once in a thousand.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from plait.comm.mesh import Axis
from plait.errors import TransportError, TransportTimeout
from plait.overlap.transport.base import Capability
from plait.overlap.transport.piecewise import PiecewiseGather, PiecewiseReduce
from plait.overlap.transport.pool import Pool
from plait.schedule.step import Flow, Message, Method

ResultT = TypeVar("ResultT")

Timing = Literal["early", "late", "mixed"]
"""When a message is copied: as soon as both sides have named it, when it is waited for, or one or the other."""


class ThreadWorld:
    """The ranks of one axis, each a thread.

    With `delay_s`, each step of each rank is preceded by a pause of up to so long, drawn from `seed`. A rank that waits
    for more than `timeout_s` fails, and all others with it.
    """

    def __init__(
        self,
        degree: int,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float = 20.0,
        timing: Timing = "mixed",
        delay_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.degree = degree
        self.reduce_dtype = reduce_dtype
        self.timeout_s = timeout_s
        self.timing = timing
        self.delay_s = delay_s
        self.seed = seed
        self.changed = threading.Condition()
        """Held to read or write what follows and every message."""
        self.half_named: dict[tuple[int, int, int], _Mail] = {}
        """Messages that one side has named, by source, target and round."""
        self.failure: str | None = None

    def run(self, function: Callable[["ThreadTransport"], ResultT]) -> list[ResultT]:
        """Call `function` on every rank at once; the results in rank order.

        Raises:
            Exception: what the first rank to fail raised.
        """
        results: list[Any] = [None] * self.degree
        errors: list[Exception] = []

        def be_rank(rank: int) -> None:
            try:
                results[rank] = function(ThreadTransport(self, rank))
            except Exception as error:
                with self.changed:
                    errors.append(error)
                    self.failure = self.failure or f"rank {rank} failed: {error}"
                    self.changed.notify_all()

        threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in range(self.degree)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class ThreadTransport:
    """Moves messages between the threads of a `ThreadWorld`."""

    capability = Capability("threads", frozenset({"cpu"}), frozenset(Method), needs_one_host=True)
    keeps_memory = False

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.axis = Axis("tp", world.degree, rank, tuple(range(world.degree)), None, world.reduce_dtype)
        self._link = _ThreadLink(world, rank)
        self._pool = Pool()

    def open_gather(self, flow: Flow, x_shard: Tensor, label: str) -> PiecewiseGather:
        """Begin to gather `x_shard`, the own rows."""
        self._link.check_idle()
        return PiecewiseGather(flow, x_shard, self.axis, self._link, label)

    def open_reduce(
        self, flow: Flow, width: int, dtype: torch.dtype, device: torch.device, label: str
    ) -> PiecewiseReduce:
        """Begin to reduce rows of `width` elements in `dtype`."""
        self._link.check_idle()
        partial = self._pool.take(flow.split.size, width, dtype, device)
        return PiecewiseReduce(flow, partial, self.axis, self._link, self._pool, label)


class _ThreadLink:
    """One rank's side of the mailbox."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._random = random.Random(world.seed * 1000 + rank)
        self._expected: dict[int, _Mail] = {}
        """By round."""
        self._sent: list[tuple[Message, _Mail]] = []

    def check_idle(self, ahead: str | None = None) -> None:
        assert ahead is None, ahead
        if self._expected or self._sent:
            left = f"{len(self._expected)} messages may still come, and {len(self._sent)} still leave"
            raise TransportError(f"an earlier run was left in the middle: {left}")

    def recv(self, message: Message, room: Tensor) -> None:
        # Whoever reads it before it was waited for has nothing to be lucky with.
        room.view(torch.uint8).fill_(0xFF)
        with self._after_pause():
            mail = self._find(message)
            mail.room = room
            self._expected[message.round] = mail
            mail.deliver_early()

    def send(self, message: Message, rows: Tensor) -> None:
        with self._after_pause():
            mail = self._find(message)
            mail.rows = rows
            self._sent.append((message, mail))
            mail.deliver_early()

    def wait(self, message: Message) -> None:
        with self._after_pause():
            mail = self._expected[message.round]
            self._wait_until(lambda: mail.rows is not None, message)
            mail.deliver()
            del self._expected[message.round]

    def flush(self, tensor: str) -> None:
        with self._after_pause():
            for message, mail in self._sent:
                if message.tensor == tensor:
                    self._wait_until(lambda mail=mail: mail.has_arrived, message)  # type: ignore[misc]
            self._sent = [(message, mail) for message, mail in self._sent if message.tensor != tensor]

    @contextmanager
    def _after_pause(self) -> Iterator[None]:
        """Have the mailbox to oneself, and tell the others afterwards."""
        if self._world.delay_s:
            time.sleep(self._random.random() * self._world.delay_s)
        with self._world.changed:
            yield
            self._world.changed.notify_all()

    def _find(self, message: Message) -> "_Mail":
        """The message as the other side has named it, or a new one. Then each side has it, and its name is free."""
        key = (message.source, message.target, message.round)
        mail = self._world.half_named.pop(key, None)
        if mail is None:
            chance = {"early": 1.0, "late": 0.0, "mixed": 0.5}[self._world.timing]
            is_early = random.Random(f"{self._world.seed} {message}").random() < chance
            self._world.half_named[key] = mail = _Mail(is_early)
        return mail

    def _wait_until(self, is_so: Callable[[], bool], message: Message) -> None:
        world = self._world
        has_come = world.changed.wait_for(lambda: is_so() or world.failure is not None, world.timeout_s)
        if not has_come:
            raise TransportTimeout(f"{message} timed out after {world.timeout_s:g} s")
        if not is_so():
            raise TransportError(f"{message} failed: {world.failure}")


class _Mail:
    """One message."""

    def __init__(self, is_early: bool) -> None:
        self.is_early = is_early
        self.rows: Tensor | None = None
        self.room: Tensor | None = None
        self.has_arrived = False

    def deliver_early(self) -> None:
        if self.is_early:
            self.deliver()

    def deliver(self) -> None:
        """Copy it if both sides have named it."""
        if self.rows is None or self.room is None or self.has_arrived:
            return
        if self.rows.shape != self.room.shape or self.rows.dtype != self.room.dtype:
            sent, expected = ((list(x.shape), x.dtype) for x in (self.rows, self.room))
            raise TransportError(f"{sent} was sent where {expected} was expected")
        self.room.copy_(self.rows)
        self.has_arrived = True
