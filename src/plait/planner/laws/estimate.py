"""What a law answers."""

from dataclasses import dataclass
from typing import Literal

Limit = Literal["compute", "memory", "latency", "bandwidth"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted time.

    Attributes:
        uncertainty: by what share measurements differ from it on the average.
        constants: names of the catalog's constants it depends on.
        limit: what takes most of it.
    """

    seconds: float
    uncertainty: float
    constants: tuple[str, ...]
    limit: Limit
