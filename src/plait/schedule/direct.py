"""Direct exchange: every piece goes straight from the rank that has it to each rank that needs it.

At distance d, rank r sends its pieces to r - d and receives those of r + d, so that nobody is sent two at once. Sums
are taken in rank order whoever owns them, so they do not depend on the owner.
"""

from collections.abc import Sequence

from plait.schedule.movement import Gather, Reduction
from plait.schedule.piece import Pieces
from plait.schedule.step import Add, Content, Message, Recv, Send, Wait


def build_gather(tensor: str, pieces: Pieces, rank: int, rounds: Sequence[int]) -> Gather:
    """Gather the pieces of all ranks."""
    incoming, outgoing = [], []
    for index, distance, number in _walk(pieces, rounds):
        source, target = (rank + distance) % pieces.degree, (rank - distance) % pieces.degree
        if (piece := pieces.find(source, index)) is not None:
            incoming.append(Message(tensor, Content.VALUE, piece, source, rank, number))
        if (own := pieces.find(rank, index)) is not None:
            outgoing.append(Message(tensor, Content.VALUE, own, rank, target, number))
    return Gather(
        tuple(map(Recv, incoming)),
        tuple(map(Send, outgoing)),
        tuple((message.piece, (Wait(message),)) for message in incoming),
    )


def build_reduction(tensor: str, pieces: Pieces, rank: int, rounds: Sequence[int]) -> Reduction:
    """Bring every addend of a piece to its owner, who sums them."""
    others = []
    incoming: dict[int, list[Message]] = {}
    for index, distance, number in _walk(pieces, rounds):
        source, target = (rank + distance) % pieces.degree, (rank - distance) % pieces.degree
        if (piece := pieces.find(target, index)) is not None:
            others.append((piece, (Send(Message(tensor, Content.ADDEND, piece, rank, target, number)),)))
        if (own := pieces.find(rank, index)) is not None:
            incoming.setdefault(index, []).append(Message(tensor, Content.ADDEND, own, source, rank, number))
    everyone = tuple(range(pieces.degree))
    return Reduction(
        tuple(Recv(message) for messages in incoming.values() for message in messages),
        tuple(others),
        tuple(
            (own, (*map(Wait, incoming.get(index, ())), Add(tensor, own, everyone)))
            for index in range(pieces.chunks)
            if (own := pieces.find(rank, index)) is not None
        ),
    )


def _walk(pieces: Pieces, rounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Chunk, distance between the ranks, and number of every round."""
    return [
        (index, distance, rounds[(distance - 1) * pieces.chunks + index])
        for distance in range(1, pieces.degree)
        for index in range(pieces.chunks)
    ]
