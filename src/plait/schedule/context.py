"""Ring attention as data: which block of keys and values travels when, and when it is computed with.

A block is what one rank owns; it goes from r to r + 1, hop by hop, as far as somebody needs it, and the next is on its
way while one is computed (Liu et al., arXiv:2310.01889). In backward the blocks travel once more, and behind each the
sum of the gradients for it: it begins at the first rank that adds to it, and goes home from the last one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from plait.contract.context.needs import Needs
from plait.contract.context.traffic import DKV, KV
from plait.errors import ScheduleError
from plait.schedule.piece import Piece
from plait.schedule.step import Content, Flush, Message, Recv, Send, Wait
from plait.sharding import Split


@dataclass(frozen=True)
class Attend:
    """Compute with the own queries and the keys of `owner`, forward or backward."""

    owner: int

    def __str__(self) -> str:
        return f"attend {self.owner}"


@dataclass(frozen=True)
class Sum:
    """Put what this rank has computed and what has come of the gradient for the keys of `owner` into one.

    Attributes:
        adds_own: whether this rank has computed any.
        adds_received: whether any has come.
    """

    owner: int
    adds_own: bool
    adds_received: bool

    def __str__(self) -> str:
        parts = [name for name, is_there in (("own", self.adds_own), ("received", self.adds_received)) if is_there]
        return f"sum {self.owner} of {' and '.join(parts) or 'nothing'}"


RingStep = Recv | Send | Wait | Flush | Attend | Sum


@dataclass(frozen=True)
class RingProgram:
    """What one rank does in a pass of ring attention.

    Attributes:
        direction: forward or backward.
        split: how many tokens each rank has.
    """

    direction: str
    rank: int
    split: Split
    steps: tuple[RingStep, ...]

    @property
    def messages_sent(self) -> list[Message]:
        """In the order of sending."""
        return [step.message for step in self.steps if isinstance(step, Send)]


@lru_cache(maxsize=1024)
def build_ring_forward(needs: Needs, split: Split, rank: int) -> RingProgram:
    """Blocks come hop by hop; of each, what the queries of `rank` see is computed while the next is on its way.

    Raises:
        ScheduleError: `split` is not one over the ranks of `needs`.
    """
    ring = _Ring(needs, split, rank)
    steps: list[RingStep] = []
    for hop in range(max(needs.reach, default=0) + 1):
        incoming, outgoing = ring.pass_keys(hop, hop)
        steps += [*map(Recv, incoming), *map(Send, outgoing), *ring.attend(hop), *map(Wait, incoming)]
        steps += [Flush(KV) for _ in outgoing]
    return RingProgram("forward", rank, split, (*steps, *ring.end(KV)))


@lru_cache(maxsize=1024)
def build_ring_backward(needs: Needs, split: Split, rank: int) -> RingProgram:
    """As forward; a sum has come by the time the block it belongs to is computed, and goes on behind it.

    Each hop has three rounds: for the keys, for a sum that goes on, and for one that goes home.

    Raises:
        ScheduleError: `split` is not one over the ranks of `needs`.
    """
    ring = _Ring(needs, split, rank)
    steps: list[RingStep] = []
    coming: list[Message] = []
    """The sum for the next block."""
    home: list[Message] = []
    is_sending = False
    for hop in range(max(needs.reach, default=0) + 1):
        incoming, outgoing = ring.pass_keys(hop, 3 * hop)
        sums_in, sums_out, sums_home = ring.pass_sums(hop, 3 * hop + 1)
        steps += [*map(Recv, (*incoming, *sums_in, *sums_home)), *map(Send, outgoing), *ring.attend(hop)]
        steps += map(Wait, coming)
        if sums_out:
            owner = sums_out[0].piece.owner
            steps += [Flush(DKV)] if is_sending else []
            steps += [Sum(owner, needs.table[rank][owner], bool(coming)), *map(Send, sums_out)]
            is_sending = True
        steps += [*map(Wait, incoming), *(Flush(KV) for _ in outgoing)]
        coming, home = sums_in, home + sums_home
    steps += [*map(Wait, home), Sum(rank, needs.table[rank][rank], bool(home))]
    return RingProgram("backward", rank, split, (*steps, *ring.end(DKV)))


class _Ring:
    """Who passes what at which hop, as `rank` sees it."""

    def __init__(self, needs: Needs, split: Split, rank: int) -> None:
        if split.degree != needs.degree or not 0 <= rank < needs.degree:
            raise ScheduleError(
                f"ring attention of {needs.degree} ranks: rank {rank} with tokens cut as "
                f"{', '.join(map(str, split.intervals))} is not one of them"
            )
        self.needs, self.split, self.rank, self.degree = needs, split, rank, needs.degree

    def attend(self, hop: int) -> Iterator[Attend]:
        """Compute with the block at hand, unless all of it is hidden."""
        owner = self._owner_at(self.rank, hop)
        if self.needs.table[self.rank][owner]:
            yield Attend(owner)

    def end(self, tensor: str) -> Iterator[Flush]:
        """What ends a pass in which anything moves: a link counts rounds afresh behind it."""
        if any(self.needs.reach):
            yield Flush(tensor)

    def pass_keys(self, hop: int, round: int) -> tuple[list[Message], list[Message]]:
        """The block that comes while that of `hop` is computed, and the one that goes on."""
        incoming, outgoing = (self._pass_on(source, hop, round) for source in (self.rank - 1, self.rank))
        return incoming, outgoing

    def pass_sums(self, hop: int, round: int) -> tuple[list[Message], list[Message], list[Message]]:
        """What comes for the next block, what goes on or home, and what comes home, after `hop` is computed."""
        incoming, own = (self._send_sum(source, hop, round) for source in (self.rank - 1, self.rank))
        source = (self.rank + hop) % self.degree
        home = self._send_sum(source, hop, round) if hop else []
        coming = [each for each in incoming if each.target == self.rank != each.piece.owner]
        return coming, own, [each for each in home if each.target == self.rank]

    def _owner_at(self, rank: int, hop: int) -> int:
        return (rank - hop) % self.degree

    def _pass_on(self, source: int, hop: int, round: int) -> list[Message]:
        source %= self.degree
        owner = self._owner_at(source, hop)
        if hop >= self.needs.reach[owner]:
            return []
        return [Message(KV, Content.VALUE, self._piece(owner), source, (source + 1) % self.degree, round)]

    def _send_sum(self, source: int, hop: int, round: int) -> list[Message]:
        source %= self.degree
        owner = self._owner_at(source, hop)
        hops = self.needs.hops[owner]
        if not hops or not hops[0] <= hop <= hops[-1]:
            return []
        is_last = hop == hops[-1]
        target = owner if is_last else (source + 1) % self.degree
        return [Message(DKV, Content.ADDEND, self._piece(owner), source, target, round + is_last)]

    def _piece(self, owner: int) -> Piece:
        return Piece(owner, 0, self.split.intervals[owner])
