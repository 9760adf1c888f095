"""What was decided about one collective GEMM."""

from dataclasses import dataclass

from plait.schedule.step import Method

LIBRARY = "library"
"""The transport of whole collectives, those of torch.distributed; what else there is moves pieces."""


FUSED = "symm_mem"
"""The transport of operations that compute and move a whole pass at once: it takes no steps, and has no chunks."""


@dataclass(frozen=True)
class Way:
    """One way to run a collective GEMM."""

    method: Method
    chunks: int
    transport: str

    def __str__(self) -> str:
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        return f"{self.method}{chunks}" + (f" over {self.transport}" if self.transport != LIBRARY else "")


@dataclass(frozen=True)
class Choice:
    """A method, a chunk count and a transport, and why these.

    Attributes:
        transport: `library`, `ring`, `symm_mem` or `shm`.
        reason: why this and nothing else, in words that do not depend on the layer.
        asked: what the config asks for (`OverlapConfig.asked`).
        is_as_asked: whether it is what the config asks for; `strict` refuses to run where it is not.
        predicted_s: how long GEMMs and communication take together, by the cost model; None if it was not asked.
        predicted_exposed_s: how much of that the host waits for others.
        predicted_serial_s: how long they take with the library's collectives.
    """

    method: Method
    chunks: int
    transport: str
    reason: str
    asked: str
    is_as_asked: bool = True
    predicted_s: float | None = None
    predicted_exposed_s: float | None = None
    predicted_serial_s: float | None = None

    @property
    def overlaps(self) -> bool:
        """Whether anything is hidden, if all goes well."""
        return self.method is not Method.NONE

    @property
    def way(self) -> Way:
        """What runs."""
        return Way(self.method, self.chunks, self.transport)
