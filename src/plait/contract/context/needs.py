"""Which rank needs the keys of which: who needs none of them is not sent them, and what is hidden is not computed."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Needs:
    """Attributes: table says for each rank, for each owner of keys, whether its queries see any of them."""

    table: tuple[tuple[bool, ...], ...]

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return len(self.table)

    @cached_property
    def hops(self) -> tuple[tuple[int, ...], ...]:
        """For each owner, after how many hops round the ring its keys are needed, itself left out."""
        every = range(1, self.degree)
        return tuple(
            tuple(hop for hop in every if self.table[(owner + hop) % self.degree][owner])
            for owner in range(self.degree)
        )

    @property
    def reach(self) -> tuple[int, ...]:
        """For each owner, how many hops its keys travel; 0 where nobody else needs them."""
        return tuple(hops[-1] if hops else 0 for hops in self.hops)

    @property
    def num_skipped(self) -> int:
        """Blocks of one rank's queries and another's keys, or its own, in which all is hidden."""
        return sum(not needed for row in self.table for needed in row)
