"""Totals over operations: FLOPs, collectives by kind, bytes sent, bytes kept."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from plait.contract.collective import Collective
from plait.contract.op import Op
from plait.contract.step import list_collectives, sum_flops
from plait.sharding import Kind


@dataclass(frozen=True)
class CollectiveTally:
    """How many collectives of which kind, what they carry, and what a rank has to send for them."""

    counts: dict[Kind, int]
    payload_bytes: int
    sent_bytes: float

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "none"

    def __add__(self, other: "CollectiveTally") -> "CollectiveTally":
        counts = Counter(self.counts) + Counter(other.counts)
        return CollectiveTally(
            dict(sorted(counts.items())),
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
        )

    def __mul__(self, times: int) -> "CollectiveTally":
        counts = {kind: count * times for kind, count in self.counts.items()}
        return CollectiveTally(counts, self.payload_bytes * times, self.sent_bytes * times)


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


def build_tally(ops: Iterable[Op]) -> Tally:
    """Add `ops` up."""
    ops = tuple(ops)
    return Tally(
        forward_flops=sum(sum_flops(op.forward) for op in ops),
        backward_flops=sum(sum_flops((*op.again, *op.backward)) for op in ops),
        forward=count_collectives(each for op in ops for each in list_collectives(op.forward)),
        backward=count_collectives(each for op in ops for each in list_collectives((*op.again, *op.backward))),
        saved_bytes=sum(op.saved_bytes for op in ops),
    )
