"""The sequences of a forward pass as one rank sees them: which of their tokens it has, and what sees what."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from plait.contract.context.mask import CAUSAL, AttentionMask
from plait.errors import ShardingError
from plait.sharding import Interval
from plait.sharding.token_order import TokenOrder


@dataclass(frozen=True)
class Sequences:
    """All sequences of a pass are of one length.

    Attributes:
        order: how the tokens of each sequence are dealt to the ranks of the context axis.
        rank: place of this rank on that axis.
    """

    order: TokenOrder
    rank: int
    mask: AttentionMask = CAUSAL

    @property
    def size(self) -> int:
        """Tokens of a whole sequence."""
        return self.order.size

    @property
    def num_own(self) -> int:
        """Tokens of a sequence that this rank has."""
        return self.order.split.lengths[self.rank]

    def list_runs(self, own: Interval) -> list[Interval]:
        """Where this rank's tokens `own`, counted through the batch `[B, S/cp]`, are in the whole batch `[B, S]`.

        Intervals of tokens that are side by side in both, in the order of `own`.

        Raises:
            ShardingError: there are such tokens, but this rank has none of any sequence.
        """
        if len(own) and not self.num_own:
            raise ShardingError(f"tokens {own} of context rank {self.rank}, which has none of {self.size}")
        return list(self._iterate_runs(own)) if len(own) else []

    def _iterate_runs(self, own: Interval) -> Iterator[Interval]:
        for row in range(own.start // self.num_own, (own.stop - 1) // self.num_own + 1):
            for place, chunk in zip(self._places, self.order.chunks[self.rank], strict=True):
                first = row * self.num_own + place
                part = own.intersect(Interval(first, first + len(chunk)))
                if len(part):
                    shift = row * self.size + chunk.start - first
                    yield Interval(part.start + shift, part.stop + shift)

    @cached_property
    def _places(self) -> list[int]:
        """Where each own chunk begins among the own tokens of a sequence."""
        return [0, *accumulate(map(len, self.order.chunks[self.rank]))][:-1]
