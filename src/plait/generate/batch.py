"""Continuous batching: requests enter and leave a running batch at any step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from plait.generate.request import Capacity, Event, Request


@dataclass(frozen=True)
class Limits:
    """What bounds a step."""

    max_requests: int = 32
    """Requests that are decoded together; others wait in the order in which they came."""
    max_prefill_tokens: int = 512
    """Prompt tokens in one step, so that a long prompt makes nobody wait for long."""


class ContinuousBatch:
    """Requests that are decoded together, one token each a step.

    Every rank of the mesh holds one and calls `step` with the same arguments; every rank gets the same events.
    """

    capacity: Capacity

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        raise NotImplementedError

    def step(self, arrivals: Sequence[Request] = (), cancelled: Collection[str] = ()) -> list[Event]:
        """Take `arrivals` in, let `cancelled` go, and bring every running request forward by a token at most.

        A request whose prompt is still being read has no event; an unknown id in `cancelled` is of a request that has
        ended already, and is passed over. With nothing running and nothing arriving, nothing is computed nor moved.

        Raises:
            ConfigError: an arrival that `capacity.check` refuses, or with the id of another that has not ended.
        """
        raise NotImplementedError
