"""The memory that an axis shares, agreed on by its ranks over their process group."""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from plait.comm import trace
from plait.comm.shared import futex
from plait.comm.shared.abandoned import remove_abandoned_memory
from plait.comm.shared.arena import Arena, create_file, describe_room, map_file
from plait.comm.shared.channel import Channel
from plait.comm.shared.collectives import SharedCollectives
from plait.comm.shared.flags import LINE_WORDS, WORD_BYTES, Flags
from plait.comm.shared.peer import Peer
from plait.errors import TransportError, TransportTimeout

_TOKEN_BYTES = 16
_NUM_CHANNELS = 3

Said = TypeVar("Said")


@dataclass(frozen=True)
class _Offer:
    """What a rank says of itself; the first one also which file it has made, and what it has written at its end."""

    peer: Peer | None = None
    path: Path | None = None
    token: bytes = b""
    lack: str | None = None


class SharedMemory:
    """Memory of all ranks of an axis, for as long as the axis or a tensor in it is there.

    Attributes:
        collectives: whole ones.
        gather: turns of rows that are gathered piece by piece.
        reduce: turns of rows that are summed piece by piece.
    """

    def __init__(self, file: int, flags: Flags) -> None:
        self.rank, self.degree = flags.rank, flags.degree
        arena = Arena(file, flags, _num_control_bytes(flags.degree))
        whole, self.gather, self.reduce = (Channel(flags, arena) for _ in range(_NUM_CHANNELS))
        self.collectives = SharedCollectives(whole)


def build_shared_memory(
    group: dist.ProcessGroup, rank: int, ranks: tuple[int, ...], timeout_s: Callable[[], float]
) -> SharedMemory | str:
    """The memory of `ranks`, those of `group`, of which this is number `rank`; or why they cannot share any.

    Waiting in it ends after what `timeout_s` says then.

    All of them have to call it, and all get the same answer. Whether they are on one host they find out by trying:
    hosts have one name in some containers, and containers of one host may or may not share memory.

    Raises:
        TransportError: a rank did not take part.
    """
    num_bytes = _num_control_bytes(len(ranks))
    own, held = _offer(rank, num_bytes)
    try:
        offers = _exchange(own, group)
        if (lack := _list_lacks(ranks, [offer.lack for offer in offers])) is not None:
            return lack
        found = _open(offers[0], num_bytes)
        lack = _list_lacks(ranks, _exchange(found if isinstance(found, str) else None, group))
    finally:
        # From here on it is there for as long as someone maps it.
        if own.path is not None and held is not None:
            own.path.unlink()
            os.close(held)
    if isinstance(found, str) or lack is not None:
        if isinstance(found, int):
            os.close(found)
        return lack or str(found)
    peers = [offer.peer for offer in offers if offer.peer is not None]
    return SharedMemory(found, Flags(map_file(found, num_bytes), rank, ranks, peers, timeout_s))


def _num_control_bytes(degree: int) -> int:
    """Flags and the token, in whole pages."""
    num_lines = Flags.lines_of_sleepers(degree) + Arena.num_lines() + _NUM_CHANNELS * Channel.num_lines(degree)
    return -(-(num_lines * LINE_WORDS * WORD_BYTES + _TOKEN_BYTES) // PAGESIZE) * PAGESIZE


def _offer(rank: int, num_bytes: int) -> tuple[_Offer, int | None]:
    """What this rank says, and the descriptor by which the first one holds its file."""
    if (lack := futex.describe_lack()) is not None:
        return _Offer(lack=lack), None
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        own = Peer.of(os.getpid())
        if rank:
            return _Offer(own), None
        remove_abandoned_memory()
        path, held = create_file(num_bytes, token)
    except FileNotFoundError as error:
        return _Offer(lack=f"there is no {error.filename}"), None
    except OSError as error:
        return _Offer(lack=f"{error.strerror}: {describe_room(num_bytes)}"), None
    return _Offer(own, path, token), held


def _open(offer: _Offer, num_bytes: int) -> int | str:
    """The file that the first rank has made; or why it is not there."""
    assert offer.path is not None, offer
    try:
        file = os.open(offer.path, os.O_RDWR)
    except OSError as error:
        return f"it does not see the memory of the first rank, so it is on another host: {error}"
    if os.pread(file, _TOKEN_BYTES, num_bytes - _TOKEN_BYTES) == offer.token:
        return file
    os.close(file)
    return f"{offer.path} is not the memory of the first rank, so it is on another host"


def _exchange(said: Said, group: dist.ProcessGroup) -> list[Said]:
    """What each rank says."""
    heard: list[Said] = [said] * group.size()
    try:
        dist.all_gather_object(heard, said, group=group)
    except RuntimeError as error:
        kind = TransportTimeout if "timed out" in str(error).lower() else TransportError
        raise kind(f"{trace.identity()}: ranks could not agree on shared memory: {error}") from error
    return heard


def _list_lacks(ranks: tuple[int, ...], lacks: Sequence[str | None]) -> str | None:
    named = [f"rank {rank}: {lack}" for rank, lack in zip(ranks, lacks, strict=True) if lack is not None]
    return "; ".join(named) or None
