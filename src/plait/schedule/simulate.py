"""A simulated clock: how long the programs of all ranks take on a machine described by a few numbers.

Each rank has a host that takes the steps of its program in order, and a link to a switch that carries one message at a
time in each direction. Messages leave a rank in the order in which they are sent and come in the order of their rounds,
so nothing depends on who happens to be first, and a faster link never makes a schedule slower.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from plait.errors import ScheduleError
from plait.schedule.costs import Costs
from plait.schedule.step import Add, Collect, Flush, Message, Multiply, Program, Recv, Send, Step, Wait
from plait.schedule.timeline import Event, Timeline, Track, Usage


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """Run the programs of ranks 0, 1, ... from a common start.

    Raises:
        ScheduleError: programs that wait for each other for ever.
    """
    return _Run(programs, costs).finish()


@dataclass(slots=True, eq=False)
class _Transfer:
    """A message, and when it was sent, given room, and gone."""

    message: Message
    seconds: float
    sent_s: float | None = None
    posted_s: float | None = None
    has_begun: bool = False
    left_s: float | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """What a rank computes at the moment; `left_s` is what was left at `seen_s` if nothing disturbed it."""

    step: Multiply | Add
    start_s: float
    left_s: float
    seen_s: float
    version: int = 0


@dataclass(slots=True, eq=False)
class _Rank:
    """A host, and the two directions of its link."""

    program: Program
    outgoing: deque[_Transfer]
    incoming: deque[_Transfer]
    unsent: Counter[str]
    now_s: float = 0.0
    position: int = 0
    waits_for: _Transfer | Flush | Collect | None = None
    job: _Job | None = None
    num_moving: int = 0
    free_s: dict[Track, float] = field(default_factory=lambda: {Track.SEND: 0.0, Track.RECV: 0.0})
    busy_s: dict[Track, float] = field(default_factory=lambda: dict.fromkeys(Track, 0.0))
    exposed_s: float = 0.0

    def wait_until(self, time_s: float) -> None:
        """Let time pass without anything to do."""
        self.exposed_s += max(0.0, time_s - self.now_s)
        self.now_s = max(self.now_s, time_s)


class _Run:
    def __init__(self, programs: Sequence[Program], costs: Costs) -> None:
        self.costs = costs
        self.events: list[Event] = []
        self.transfers = {  # by what is unique in a message: hashing all of it takes longer than the rest
            (message.source, message.round): _Transfer(
                message, costs.row_bytes[message.tensor] * len(message.piece.rows) / costs.bytes_per_s
            )
            for program in programs
            for message in program.messages_sent
        }
        self.ranks = [self._build_rank(program) for program in programs]
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = count()

    def _build_rank(self, program: Program) -> _Rank:
        sent = [self._find(message) for message in program.messages_sent]
        received = sorted(program.messages_received, key=lambda message: message.round)
        return _Rank(
            program, deque(sent), deque(map(self._find, received)), Counter(each.message.tensor for each in sent)
        )

    def _find(self, message: Message) -> _Transfer:
        return self.transfers[message.source, message.round]

    def finish(self) -> Timeline:
        """Run to the end."""
        for rank in self.ranks:
            self._advance(rank)
        while self.queue:
            time_s, _, act = heappop(self.queue)
            act(time_s)
        stuck = [rank.program.rank for rank in self.ranks if rank.position < len(rank.program.steps)]
        if stuck:
            raise ScheduleError(f"{self.ranks[0].program.method} schedule never ends: ranks {stuck} wait for ever")
        usage = tuple(
            Usage(rank.busy_s[Track.COMPUTE], max(rank.busy_s[Track.SEND], rank.busy_s[Track.RECV]), rank.exposed_s)
            for rank in self.ranks
        )
        return Timeline(tuple(self.events), usage, max((rank.now_s for rank in self.ranks), default=0.0))

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heappush(self.queue, (time_s, next(self.number), act))

    def _advance(self, rank: _Rank) -> None:
        """Take steps until one has to wait."""
        steps = rank.program.steps
        while rank.position < len(steps) and self._take(rank, steps[rank.position]):
            rank.position += 1

    def _take(self, rank: _Rank, step: Step) -> bool:
        """Take a step; whether that is all there is to it."""
        match step:
            case Multiply() | Add():
                return self._compute(rank, step)
            case Recv() | Send():
                return self._issue(rank, step)
            case Wait(message):
                return self._wait(rank, self._find(message))
            case Flush(tensor):
                if rank.unsent[tensor]:
                    rank.waits_for = step
                    return False
                rank.wait_until(rank.free_s[Track.SEND])
                return True
            case Collect():
                rank.waits_for = step
                if all(each.waits_for == step for each in self.ranks):
                    self._collect(step)
                return False

    def _issue(self, rank: _Rank, step: Recv | Send) -> bool:
        rank.now_s += self.costs.step_s
        transfer = self._find(step.message)
        if isinstance(step, Send):
            transfer.sent_s = rank.now_s
        else:
            transfer.posted_s = rank.now_s
        self._begin_if_ready(transfer)
        return True

    def _wait(self, rank: _Rank, transfer: _Transfer) -> bool:
        if transfer.left_s is None:
            rank.waits_for = transfer
            return False
        rank.wait_until(transfer.left_s + self.costs.latency_s)
        rank.now_s += self.costs.step_s
        return True

    def _collect(self, step: Collect) -> None:
        """All ranks have come: the collective begins with the last."""
        start_s = max(rank.now_s for rank in self.ranks)
        end_s = start_s + self.costs.collect_s[step.tensor]
        for rank in self.ranks:
            rank.wait_until(end_s)
            rank.position += 1
            rank.waits_for = None
            for track in (Track.SEND, Track.RECV):
                self._note(rank, track, step, start_s, end_s)
        for rank in self.ranks:
            self._advance(rank)

    def _begin_if_ready(self, transfer: _Transfer) -> None:
        """Begin as soon as both ends are free, if both have come to this message."""
        source, target = self.ranks[transfer.message.source], self.ranks[transfer.message.target]
        if transfer.sent_s is None or transfer.posted_s is None or transfer.has_begun:
            return
        if source.outgoing[0] is not transfer or target.incoming[0] is not transfer:
            return
        transfer.has_begun = True
        start_s = max(transfer.sent_s, transfer.posted_s, source.free_s[Track.SEND], target.free_s[Track.RECV])
        if self.costs.contention:
            self._at(start_s, partial(self._disturb, (source, target), 1))
        self._at(start_s + transfer.seconds, partial(self._end, transfer, start_s))

    def _end(self, transfer: _Transfer, start_s: float, time_s: float) -> None:
        """The last byte has left: the next messages of both ends may begin."""
        message = transfer.message
        source, target = self.ranks[message.source], self.ranks[message.target]
        transfer.left_s = source.free_s[Track.SEND] = target.free_s[Track.RECV] = time_s
        self._note(source, Track.SEND, message, start_s, time_s)
        self._note(target, Track.RECV, message, start_s, time_s)
        if self.costs.contention:
            self._disturb((source, target), -1, time_s)
        source.unsent[message.tensor] -= 1
        source.outgoing.popleft()
        target.incoming.popleft()
        for queue in (source.outgoing, target.incoming):
            if queue:
                self._begin_if_ready(queue[0])
        if target.waits_for is transfer:
            self._wake(target)
        if isinstance(source.waits_for, Flush) and not source.unsent[source.waits_for.tensor]:
            self._wake(source)

    def _wake(self, rank: _Rank) -> None:
        rank.waits_for = None
        self._advance(rank)

    def _compute(self, rank: _Rank, step: Multiply | Add) -> bool:
        seconds = self.costs.seconds_of(step)
        if self.costs.contention and seconds:
            rank.job = _Job(step, rank.now_s, seconds, rank.now_s)
            self._at(rank.now_s, partial(self._disturb, (rank,), 0))
            return False
        self._note(rank, Track.COMPUTE, step, rank.now_s, rank.now_s + seconds)
        rank.now_s += seconds
        return True

    def _disturb(self, ranks: Sequence[_Rank], change: int, time_s: float) -> None:
        """More or less moves at `ranks` from now on: what they compute will end at another time."""
        for rank in ranks:
            if (job := rank.job) is not None and time_s >= job.seen_s:
                job.left_s -= (time_s - job.seen_s) * self._speed(rank)
                job.seen_s = time_s
            rank.num_moving += change
            if job is not None and time_s >= job.seen_s and (speed := self._speed(rank)):
                job.version += 1
                self._at(time_s + max(0.0, job.left_s) / speed, partial(self._end_job, rank, job, job.version))

    def _speed(self, rank: _Rank) -> float:
        return 1.0 - self.costs.contention if rank.num_moving else 1.0

    def _end_job(self, rank: _Rank, job: _Job, version: int, time_s: float) -> None:
        if rank.job is job and job.version == version:
            rank.job = None
            self._note(rank, Track.COMPUTE, job.step, job.start_s, time_s)
            rank.now_s = time_s
            rank.position += 1
            self._advance(rank)

    def _note(
        self, rank: _Rank, track: Track, what: Multiply | Add | Message | Collect, start_s: float, end_s: float
    ) -> None:
        if end_s > start_s:
            rank.busy_s[track] += end_s - start_s
            self.events.append(Event(rank.program.rank, track, what, start_s, end_s))
