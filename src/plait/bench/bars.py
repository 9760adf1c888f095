"""From what ranks saw, or a simulated clock, to the bars of a chart."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from plait.bench.recorder import Taken
from plait.bench.watched_link import Direction, Transfer
from plait.schedule.chart import TRACKS, Bar, BarTrack, Chart
from plait.schedule.pair import find_gemm
from plait.schedule.step import Add, Collect, Message, Multiply, Step, Wait
from plait.schedule.timeline import Timeline, Track


@dataclass(frozen=True)
class Seen:
    """A message at one of its ends, as a rank saw it."""

    message: Message
    direction: Direction
    issued_s: float
    end_s: float

    @classmethod
    def of(cls, transfer: Transfer) -> "Seen":
        """What there is to keep of a transfer."""
        return cls(transfer.message, transfer.direction, transfer.issued_s, transfer.end_s)


@dataclass(frozen=True)
class RankView:
    """What one rank saw of a run, on the clock of its host."""

    taken: tuple[Taken, ...]
    seen: tuple[Seen, ...]


def build_measured_chart(title: str, views: Sequence[RankView]) -> Chart:
    """Put what all ranks saw together; they are on one host, whose clock they share.

    A transfer is drawn from the moment at which both ends were ready and the one before was through: until it ends.
    """
    ready_s = _find_ready(views)
    bars = [
        bar
        for rank, view in enumerate(views)
        for bar in (*_list_host_bars(rank, view), *_list_transfer_bars(rank, view, ready_s))
    ]
    origin_s = min((bar.start_s for bar in bars), default=0.0)
    moved = (replace(bar, start_s=bar.start_s - origin_s, end_s=bar.end_s - origin_s) for bar in bars)
    return Chart(title, tuple(sorted(moved, key=lambda bar: (bar.rank, TRACKS.index(bar.track), bar.start_s))))


def build_simulated_chart(title: str, timelines: Iterable[Timeline]) -> Chart:
    """Passes one behind the other, each on its simulated clock."""
    bars: list[Bar] = []
    start_s = 0.0
    for timeline in timelines:
        for event in timeline.events:
            track: BarTrack = (
                "compute" if event.track is Track.COMPUTE else "send" if event.track is Track.SEND else "recv"
            )
            bars.append(
                Bar(
                    event.rank,
                    track,
                    _name_kind(event.what),
                    event.name,
                    start_s + event.start_s,
                    start_s + event.end_s,
                )
            )
        start_s += timeline.duration_s
    return Chart(title, tuple(bars))


def _find_ready(views: Sequence[RankView]) -> dict[int, float]:
    """When both ends of each message were ready, by the identity of what either saw of it."""
    ready_s: dict[int, float] = {}
    sides: dict[tuple[int, int, int, int], Seen] = {}
    for direction in ("send", "recv"):
        counts: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        for seen in (seen for view in views for seen in view.seen if seen.direction == direction):
            where = (seen.message.source, seen.message.target, seen.message.round)
            other = sides.setdefault((*where, counts[where]), seen)
            counts[where] += 1
            ready_s[id(seen)] = ready_s[id(other)] = max(seen.issued_s, other.issued_s)
    return ready_s


def _list_host_bars(rank: int, view: RankView) -> Iterator[Bar]:
    """What the host computed, and, where no messages were watched, how long it waited for them."""
    for taken in view.taken:
        step = taken.step
        if step is None:
            yield Bar(rank, "compute", "other", "other local work", taken.start_s, taken.end_s)
        elif isinstance(step, Multiply | Add):
            yield Bar(rank, "compute", _name_kind(step), str(step), taken.start_s, taken.end_s)
        elif isinstance(step, Collect | Wait) and not view.seen:
            for track in ("send", "recv") if isinstance(step, Collect) else ("recv",):
                yield Bar(rank, track, _name_kind(step), str(step), taken.start_s, taken.end_s)


def _list_transfer_bars(rank: int, view: RankView, ready_s: dict[int, float]) -> Iterator[Bar]:
    free_s: defaultdict[tuple[Direction, int], float] = defaultdict(float)
    for seen in view.seen:
        message = seen.message
        peer, way = (message.target, "to") if seen.direction == "send" else (message.source, "from")
        start_s = min(max(ready_s[id(seen)], free_s[seen.direction, peer]), seen.end_s)
        free_s[seen.direction, peer] = seen.end_s
        name = f"{message.tensor}[{message.piece}] {way} {peer}"
        yield Bar(rank, seen.direction, _name_kind(message), name, start_s, seen.end_s)


def _name_kind(what: Step | Message) -> str:
    match what:
        case Multiply(gemm):
            return find_gemm(gemm)
        case Add():
            return "add"
        case Message(tensor):
            return "reduce" if tensor in ("y", "dx") else "gather"
        case Collect():
            return "collective"
        case _:
            return "wait"
