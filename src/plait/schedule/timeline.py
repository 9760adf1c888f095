"""What happened when, on each rank: compute and communication on separate tracks."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from plait.schedule.step import Add, Collect, Message, Multiply


class Track(StrEnum):
    """What a rank does side by side."""

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"


class Event(NamedTuple):
    """Something that took time on one track of one rank."""

    rank: int
    track: Track
    what: Multiply | Add | Message | Collect
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """What it was, for people."""
        match self.what:
            case Multiply(gemm, rows):
                return f"{gemm}[{rows}]"
            case Add(tensor, piece):
                return f"add {tensor}[{piece}]"
            case Message() as message:
                peer = f"to {message.target}" if self.track is Track.SEND else f"from {message.source}"
                return f"{message.tensor}[{message.piece}] {peer}"
            case Collect(tensor):
                return f"collect {tensor}"


@dataclass(frozen=True)
class Usage:
    """What the time of one rank went into.

    Attributes:
        compute_s: GEMMs and sums, as long as they took.
        communication_s: moving bytes, in the direction that took longer.
        exposed_s: waiting for others.
    """

    compute_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True)
class Timeline:
    """A run of one schedule on all ranks."""

    events: tuple[Event, ...]
    usage: tuple[Usage, ...]
    duration_s: float

    @property
    def exposed_s(self) -> float:
        """How long the rank that waited longest waited."""
        return max(usage.exposed_s for usage in self.usage)

    def draw(self, *, width: int = 72, ranks: tuple[int, ...] | None = None) -> str:
        """One line of `width` characters per track that something happened on."""
        scale = width / self.duration_s if self.duration_s else 0.0
        lines = []
        for rank in range(len(self.usage)) if ranks is None else ranks:
            for track in Track:
                events = [event for event in self.events if (event.rank, event.track) == (rank, track)]
                if events:
                    lines.append(f"rank {rank} {track:8}{_draw_track(events, scale, width)}".rstrip())
        return "\n".join(lines)


def _draw_track(events: list[Event], scale: float, width: int) -> str:
    """Each event from bar to bar, with as much of its name as there is room for."""
    line = [" "] * (width + 1)
    for event in sorted(events, key=lambda event: event.start_s):
        start, stop = round(event.start_s * scale), round(event.end_s * scale)
        if stop > start:
            line[start : stop + 1] = f"|{event.name[: stop - start - 1]:-<{stop - start - 1}}|"
    return "".join(line)
