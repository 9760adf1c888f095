"""What computing and moving cost on one machine, as measured by `plait.overlap.machine.probe`."""

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Self

from plait.sharding import Kind


@dataclass(frozen=True)
class GemmRates:
    """How long a GEMM takes.

    Attributes:
        call_s: a call, however small.
        flops_per_s: of many rows.
        extra_rows: a piece takes as long as if it had so many rows more, as the weight is packed again for each.
    """

    call_s: float
    flops_per_s: float
    extra_rows: float


@dataclass(frozen=True)
class LibraryRates:
    """How long the library's collectives take.

    Attributes:
        call_s: a call, however small.
        all_gather_bytes_per_s: bytes of the whole tensor in a second, whatever goes over the wire; the others alike.
    """

    call_s: float
    all_gather_bytes_per_s: float
    reduce_scatter_bytes_per_s: float
    all_reduce_bytes_per_s: float

    def seconds(self, kind: Kind, num_bytes: float) -> float:
        """Of a collective of so many bytes of the whole tensor."""
        rate: float = getattr(self, f"{kind}_bytes_per_s")
        return self.call_s + num_bytes / rate


@dataclass(frozen=True)
class LinkRates:
    """How messages move over one transport, in the terms of `plait.schedule.costs.Costs`.

    Attributes:
        add_s: a sum, however small.
        add_bytes_per_s: of the smaller of two tensors that are added.
    """

    transport: str
    step_s: float
    latency_s: float
    bytes_per_s: float
    add_s: float
    add_bytes_per_s: float
    contention: float


@dataclass(frozen=True)
class Rates:
    """Everything that was measured; the same on all ranks of an axis."""

    gemm: GemmRates
    library: LibraryRates
    links: tuple[LinkRates, ...]

    def link(self, transport: str) -> LinkRates:
        """That of one transport."""
        return next(link for link in self.links if link.transport == transport)

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """From what `to_json` gives.

        Raises:
            ValueError: it is something else.
        """
        try:
            rates = cls(
                GemmRates(**record["gemm"]),
                LibraryRates(**record["library"]),
                tuple(LinkRates(**link) for link in record["links"]),
            )
        except (LookupError, TypeError) as error:
            raise ValueError(f"not rates: {error!r}") from error
        for part in (rates.gemm, rates.library, *rates.links):
            for name, value in vars(part).items():
                is_rate = name.endswith("_per_s")
                if name != "transport" and not (
                    isinstance(value, int | float) and isfinite(value) and (value > 0 if is_rate else value >= 0)
                ):
                    raise ValueError(f"not rates: {name} is {value!r}")
        return rates
