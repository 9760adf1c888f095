"""What a method gives a program to be woven from: the steps around each piece that is gathered or reduced."""

from dataclasses import dataclass

from plait.schedule.piece import Piece
from plait.schedule.step import Recv, Send, Step

Arrival = tuple[Piece, tuple[Step, ...]]
"""A piece that comes: wait, then pass on what must be passed on."""


@dataclass(frozen=True)
class Gather:
    """A gather as one rank sees it.

    Attributes:
        recvs: all of them, to be issued before anything is sent: behind a peer's bytes a late receive waits.
        sends: the own pieces.
        arrivals: pieces of others in the order in which they come.
    """

    recvs: tuple[Recv, ...]
    sends: tuple[Send, ...]
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True)
class Reduction:
    """A reduction to the owners as one rank sees it.

    Attributes:
        recvs: all of them.
        others: pieces of other owners in the order in which to compute them, each with what follows its GEMM.
        own: the own pieces, each with what finishes it.
    """

    recvs: tuple[Recv, ...]
    others: tuple[tuple[Piece, tuple[Step, ...]], ...]
    own: tuple[tuple[Piece, tuple[Step, ...]], ...]
