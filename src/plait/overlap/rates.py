"""What computing and moving cost on this machine, as measured by `plait.overlap.probe`."""

from dataclasses import dataclass

from plait.schedule.step import Content


@dataclass(frozen=True)
class GemmRate:
    """How long a GEMM of some rows takes.

    Attributes:
        call_s: of one call, however small.
        flops_per_s: of many rows.
        extra_rows: a piece takes as long as if it had so many rows more: the weight is packed again for each.
    """

    call_s: float
    flops_per_s: float
    extra_rows: float

    def seconds(self, num_rows: int, flops_per_row: int) -> float:
        """Of one GEMM."""
        return self.call_s + (num_rows + self.extra_rows) * flops_per_row / self.flops_per_s


@dataclass(frozen=True)
class LinkRate:
    """How long bytes of one kind of content are on their way over one transport.

    Attributes:
        message_s: of one message (or whole collective of the library), however small.
        bytes_per_s: what one rank receives, of a collective of the library its payload, whatever goes over the wire.
        hidden: which share of it goes on while the rank computes: 1 where the core is idle meanwhile, 0 where moving is
            the work of that very core.
    """

    message_s: float
    bytes_per_s: float
    hidden: float

    def seconds(self, num_bytes: float) -> float:
        """Of one message or collective with nothing beside it."""
        return self.message_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class TransportRates:
    """One transport: what it costs to bring rows together, and to bring addends together and add them.

    Attributes:
        values: of rows as they are.
        addends: of rows that are to be summed, the sum included.
    """

    transport: str
    values: LinkRate
    addends: LinkRate

    def find(self, content: Content) -> LinkRate:
        """That of one kind of content."""
        return self.values if content is Content.VALUE else self.addends


@dataclass(frozen=True)
class Rates:
    """Everything that was measured; the same on all ranks."""

    gemm: GemmRate
    transports: tuple[TransportRates, ...]
