"""Totals over operations: FLOPs, collectives by kind, messages, bytes sent, bytes kept."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from plait.contract.collective import Collective
from plait.contract.op import Op
from plait.contract.step import Step, list_collectives, list_messages, sum_flops
from plait.sharding import Kind


@dataclass(frozen=True)
class CollectiveTally:
    """How many collectives of which kind, and messages; what they carry, and what a rank has to send for them.

    Attributes:
        num_messages: that the rank sends, of those that are part of no collective.
    """

    counts: dict[Kind, int]
    payload_bytes: int
    sent_bytes: float
    num_messages: int = 0

    def __str__(self) -> str:
        named = [f"{count} {kind}" for kind, count in self.counts.items()]
        named += [f"{self.num_messages} send"] if self.num_messages else []
        return ", ".join(named) or "none"

    def __add__(self, other: "CollectiveTally") -> "CollectiveTally":
        counts = Counter(self.counts) + Counter(other.counts)
        return CollectiveTally(
            dict(sorted(counts.items())),
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
            self.num_messages + other.num_messages,
        )

    def __mul__(self, times: int) -> "CollectiveTally":
        counts = {kind: count * times for kind, count in self.counts.items()}
        return CollectiveTally(counts, self.payload_bytes * times, self.sent_bytes * times, self.num_messages * times)


@dataclass(frozen=True)
class Tally:
    """What operations add up to on one rank; backward with what it takes again."""

    forward_flops: int
    backward_flops: int
    forward: CollectiveTally
    backward: CollectiveTally
    saved_bytes: int

    @property
    def flops(self) -> int:
        """Forward and backward."""
        return self.forward_flops + self.backward_flops

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.forward_flops + other.forward_flops,
            self.backward_flops + other.backward_flops,
            self.forward + other.forward,
            self.backward + other.backward,
            self.saved_bytes + other.saved_bytes,
        )

    def __mul__(self, times: int) -> "Tally":
        return Tally(
            self.forward_flops * times,
            self.backward_flops * times,
            self.forward * times,
            self.backward * times,
            self.saved_bytes * times,
        )


def count_collectives(collectives: Iterable[Collective]) -> CollectiveTally:
    """Count `collectives`."""
    collectives = tuple(collectives)
    return CollectiveTally(
        counts=dict(sorted(Counter(collective.kind for collective in collectives).items())),
        payload_bytes=sum(collective.payload_bytes for collective in collectives),
        sent_bytes=sum(collective.wire_bytes_per_rank for collective in collectives),
    )


def count_messages(steps: Iterable[Step]) -> CollectiveTally:
    """Count what `steps` send beside their collectives."""
    sent = [num_bytes for messages in list_messages(steps) for num_bytes in messages.sent]
    return CollectiveTally({}, sum(sent), float(sum(sent)), len(sent))


def count_steps(steps: Iterable[Step]) -> CollectiveTally:
    """Count the collectives and messages among `steps`."""
    steps = tuple(steps)
    return count_collectives(list_collectives(steps)) + count_messages(steps)


def build_tally(ops: Iterable[Op]) -> Tally:
    """Add `ops` up."""
    ops = tuple(ops)
    return Tally(
        forward_flops=sum(sum_flops(op.forward) for op in ops),
        backward_flops=sum(sum_flops((*op.again, *op.backward)) for op in ops),
        forward=count_steps(step for op in ops for step in op.forward),
        backward=count_steps(step for op in ops for step in (*op.again, *op.backward)),
        saved_bytes=sum(op.saved_bytes for op in ops),
    )
