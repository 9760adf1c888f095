"""Rings: every piece travels from neighbour to neighbour, passed on by each rank that it passes.

One way, rank r sends to r + 1. Two ways, every other chunk travels in the opposite direction, so that links which
carry both directions at once are used in both. A sum starts with the rank behind its owner and gathers an addend at
each rank that it passes, so its order depends on the owner, but not on time.
"""

from collections.abc import Sequence

from plait.schedule.movement import Gather, Reduction
from plait.schedule.piece import Pieces
from plait.schedule.step import Add, Content, Message, Recv, Send, Step, Wait


def build_gather(tensor: str, pieces: Pieces, rank: int, rounds: Sequence[int], *, two_way: bool = False) -> Gather:
    """Gather the pieces of all ranks."""
    recvs, sends, arrivals = [], [], []
    for hop, index, behind, ahead in _walk(pieces, rank, two_way):
        number = (hop - 1) * pieces.chunks + index
        own, incoming = pieces.find(rank, index), pieces.find(rank + (behind - rank) * hop, index)
        if hop == 1 and own is not None:
            sends.append(Send(Message(tensor, Content.VALUE, own, rank, ahead % pieces.degree, rounds[number])))
        if hop == pieces.degree or incoming is None:
            continue
        message = Message(tensor, Content.VALUE, incoming, behind % pieces.degree, rank, rounds[number])
        recvs.append(Recv(message))
        steps: list[Step] = [Wait(message)]
        if hop < pieces.degree - 1:
            onward = rounds[number + pieces.chunks]
            steps.append(Send(Message(tensor, Content.VALUE, incoming, rank, ahead % pieces.degree, onward)))
        arrivals.append((incoming, tuple(steps)))
    return Gather(tuple(recvs), tuple(sends), tuple(arrivals))


def build_reduction(
    tensor: str, pieces: Pieces, rank: int, rounds: Sequence[int], *, two_way: bool = False
) -> Reduction:
    """Bring the sum of every piece to its owner, an addend at each hop."""
    recvs, others, own = [], [], []
    for hop, index, behind, ahead in _walk(pieces, rank, two_way):
        piece = pieces.find(rank + (behind - rank) * hop, index)
        if piece is None:
            continue
        number = (hop - 1) * pieces.chunks + index
        steps: list[Step] = []
        if hop > 1:
            source = behind % pieces.degree
            message = Message(tensor, Content.ADDEND, piece, source, rank, rounds[number - pieces.chunks])
            recvs.append(Recv(message))
            steps += [Wait(message), Add(tensor, piece, (source, rank))]
        if hop == pieces.degree:
            own.append((piece, tuple(steps)))
        else:
            steps.append(Send(Message(tensor, Content.ADDEND, piece, rank, ahead % pieces.degree, rounds[number])))
            others.append((piece, tuple(steps)))
    return Reduction(tuple(recvs), tuple(others), tuple(own))


def _walk(pieces: Pieces, rank: int, two_way: bool) -> list[tuple[int, int, int, int]]:
    """Hop, chunk, and the neighbours behind and ahead, for every piece that passes `rank`, in order of time."""
    return [
        (hop, index, rank - step, rank + step)
        for hop in range(1, pieces.degree + 1)
        for index in range(pieces.chunks)
        for step in (-1 if two_way and (pieces.first_index + index) % 2 else 1,)
    ]
