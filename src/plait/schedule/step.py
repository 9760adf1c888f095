"""The steps of a collective GEMM on one rank, in the order in which its host takes them."""

from dataclasses import dataclass
from enum import StrEnum

from plait.schedule.piece import Piece
from plait.sharding import Interval, Kind, Split


class Method(StrEnum):
    """How a collective is plaited into the GEMM beside it."""

    NONE = "none"
    """Not at all: the collective of the library, then the GEMM, or the other way round."""
    BULK = "bulk"
    """Whole, under a GEMM that does not need it: the gather of x under dgrad, the scatter of dx under wgrad."""
    DIRECT = "direct"
    """Each piece straight from the rank that has it to each that needs it; sums are taken in rank order."""
    RING = "ring"
    """Each piece from neighbour to neighbour, in one direction; sums start behind their owner and end at it."""
    RING_TWO_WAY = "ring_two_way"
    """As a ring, every other piece in the opposite direction."""


class Content(StrEnum):
    """What a message carries."""

    VALUE = "value"
    """Rows as they are to be everywhere."""
    ADDEND = "addend"
    """Rows that are to be added to others."""


@dataclass(frozen=True)
class Flow:
    """A tensor `[T, width]` that moves piece by piece.

    Attributes:
        tensor: its name in contracts: x, y, dx or dy.
        kind: what the movement amounts to: all_gather, reduce_scatter or all_reduce.
        split: which rows each rank owns; of an all-reduce, which rows each rank sums.
        unit: so many rows stay together, as a scale holds for all of them.
    """

    tensor: str
    kind: Kind
    split: Split
    unit: int = 1


@dataclass(frozen=True)
class Message:
    """One piece on its way from one rank to another.

    Attributes:
        round: its place in the one order in which all ranks issue messages; a rank sends at most one and receives at
            most one in a round, and a transport without tags issues the two together.
    """

    tensor: str
    content: Content
    piece: Piece
    source: int
    target: int
    round: int

    def __str__(self) -> str:
        return f"{self.content} {self.tensor}[{self.piece}] {self.source} -> {self.target}"


@dataclass(frozen=True)
class Recv:
    """Make room for a message; from now on it may come."""

    message: Message

    def __str__(self) -> str:
        return f"recv {self.message}"


@dataclass(frozen=True)
class Send:
    """Set off with a message, without waiting."""

    message: Message

    def __str__(self) -> str:
        return f"send {self.message}"


@dataclass(frozen=True)
class Wait:
    """Wait until a message has arrived."""

    message: Message

    def __str__(self) -> str:
        return f"wait {self.message}"


@dataclass(frozen=True)
class Multiply:
    """Compute rows of a GEMM, or what rows add to it where it sums over them (`wgrad`).

    Attributes:
        gemm: forward, dgrad or wgrad.
        accumulates: whether it adds to what is there already.
    """

    gemm: str
    rows: Interval
    accumulates: bool = False

    def __str__(self) -> str:
        return f"multiply {self.gemm}[{self.rows}]{' accumulating' if self.accumulates else ''}"


@dataclass(frozen=True)
class Add:
    """Sum the addends that have come from `ranks`, in that order; this rank's own is its product.

    The sum is the result where this rank owns the piece, and else what is sent on.
    """

    tensor: str
    piece: Piece
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"add {self.tensor}[{self.piece}] of {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Flush:
    """Wait until everything sent of a tensor has left, so that its memory may be used again."""

    tensor: str

    def __str__(self) -> str:
        return f"flush {self.tensor}"


@dataclass(frozen=True)
class Collect:
    """The library's collective over the whole tensor, from its first to its last byte."""

    tensor: str

    def __str__(self) -> str:
        return f"collect {self.tensor}"


Step = Recv | Send | Wait | Multiply | Add | Flush | Collect


@dataclass(frozen=True)
class Ahead:
    """A gather of the next program that is begun in this one, where the link has time.

    Attributes:
        chunks: into how many pieces the next program cuts each owner's rows.
    """

    flow: Flow
    chunks: int


@dataclass(frozen=True)
class Program:
    """What one rank does in one collective GEMM, or in the two of a backward.

    Attributes:
        chunks: into how many pieces each owner's rows were to be cut; an owner of fewer rows has fewer.
        ahead: what is sent off and received here, and waited for in the next program.
        is_begun: whether the program before has begun the gather.
    """

    method: Method
    chunks: int
    rank: int
    flows: tuple[Flow, ...]
    gemms: tuple[str, ...]
    steps: tuple[Step, ...]
    ahead: Ahead | None = None
    is_begun: bool = False

    @property
    def messages_sent(self) -> list[Message]:
        """In the order of sending."""
        return [step.message for step in self.steps if isinstance(step, Send)]

    @property
    def messages_received(self) -> list[Message]:
        """In the order of waiting."""
        return [step.message for step in self.steps if isinstance(step, Wait)]

    def flow(self, tensor: str) -> Flow:
        """The flow of `tensor`."""
        return next(flow for flow in self.flows if flow.tensor == tensor)
