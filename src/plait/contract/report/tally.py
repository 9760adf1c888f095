"""Totals over operations: FLOPs, collectives by kind, bytes sent, bytes kept."""

from collections import Counter
from collections.abc import Iterable, Sequence
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
    sent_bytes: int

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "none"


def count_collectives(collectives: Sequence[Collective]) -> CollectiveTally:
    """Count `collectives`."""
    return CollectiveTally(
        counts=dict(sorted(Counter(collective.kind for collective in collectives).items())),
        payload_bytes=sum(collective.payload_bytes for collective in collectives),
        sent_bytes=round(sum(collective.wire_bytes_per_rank for collective in collectives)),
    )


@dataclass(frozen=True)
class Tally:
    """What operations add up to on one rank."""

    forward_flops: int
    backward_flops: int
    forward: CollectiveTally
    backward: CollectiveTally
    saved_bytes: int


def build_tally(ops: Iterable[Op]) -> Tally:
    """Add `ops` up."""
    ops = tuple(ops)
    return Tally(
        forward_flops=sum(sum_flops(op.forward) for op in ops),
        backward_flops=sum(sum_flops(op.backward) for op in ops),
        forward=count_collectives([each for op in ops for each in list_collectives(op.forward)]),
        backward=count_collectives([each for op in ops for each in list_collectives(op.backward)]),
        saved_bytes=sum(op.saved_bytes for op in ops),
    )
