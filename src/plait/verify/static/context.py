"""Proof that ring attention is attention: each block of keys meets each block of queries that sees it, exactly once.

The programs of all ranks are run on symbols: a block is at hand or not, and a sum of gradients is the set of the ranks
whose addends are in it. A send ends only when its receive is posted (rendezvous), which is the worst a transport may
do. That no order of time can make them wait in a circle follows from the rounds: before a rank sends in a round it has
waited for earlier rounds only, and in a round it sends and receives at most one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from plait.contract.context.needs import Needs
from plait.contract.context.traffic import DKV, KV
from plait.errors import ScheduleError
from plait.schedule.context import Attend, RingProgram, RingStep, Sum
from plait.schedule.step import Flush, Message, Recv, Send, Wait

MAX_FOREIGN_BLOCKS = 2
"""Blocks of others that a rank holds at once: one that is computed, one on its way."""


def check_ring(programs: Sequence[RingProgram], needs: Needs) -> None:
    """Prove that `programs`, those of ranks 0, 1, ..., compute what `needs` says, forward or backward.

    Raises:
        ScheduleError: they do not; the message names the rank and the step.
    """
    if len(programs) != needs.degree:
        raise ScheduleError(f"{len(programs)} programs for ring attention of {needs.degree} ranks")
    for rank, program in enumerate(programs):
        if (program.rank, program.direction, program.split) != (rank, programs[0].direction, programs[0].split):
            raise ScheduleError(f"program {rank} is of rank {program.rank}, {program.direction}, or cut another way")
        _check_rounds(program)
    _check_matched(programs)
    _run([_Rank(program, needs) for program in programs])


def _check_rounds(program: RingProgram) -> None:
    last: dict[type, int] = {}
    for position, step in enumerate(program.steps):
        if not isinstance(step, Recv | Send | Wait):
            continue
        number = step.message.round
        here, peer = step.message.target, step.message.source
        if isinstance(step, Send):
            here, peer = peer, here
        if here != program.rank or peer == program.rank:
            _refuse(program, position, f"is not a message of rank {program.rank}")
        if not isinstance(step, Wait) and number <= last.get(type(step), -1):
            _refuse(program, position, f"round {number} comes after round {last[type(step)]}")
        if isinstance(step, Send) and number <= last.get(Wait, -1):
            _refuse(program, position, f"round {number} is sent after round {last[Wait]} was waited for")
        last[type(step)] = max(number, last.get(type(step), -1))
    if last and not isinstance(program.steps[-1], Flush):
        _refuse(program, len(program.steps), "it does not end with a flush, after which rounds are counted afresh")


def _check_matched(programs: Sequence[RingProgram]) -> None:
    """What is sent is received, once, and nothing else."""
    kinds: tuple[type[Recv | Send | Wait], ...] = (Send, Recv, Wait)
    sent, posted, waited = (
        [step.message for program in programs for step in program.steps if isinstance(step, kind)] for kind in kinds
    )
    for name, messages in (("posted", posted), ("waited for", waited)):
        lost = [message for message in sent if message not in messages]
        extra = [message for message in messages if message not in sent]
        if lost or extra:
            what = f"{lost[0]} is sent and never {name}" if lost else f"{extra[0]} is {name} and never sent"
            raise ScheduleError(f"ring attention {programs[0].direction}: {what}")
        if len(set(messages)) < len(messages):
            raise ScheduleError(f"ring attention {programs[0].direction}: a message is {name} twice")


@dataclass
class _Rank:
    """What one rank has.

    Attributes:
        blocks: of keys at hand, by owner.
        coming: blocks for which there is room.
        computed: owners of blocks that were attended.
        received: sums that have come, by owner of the block.
        sums: those that this rank has made.
        leaving: messages on their way.
    """

    program: RingProgram
    needs: Needs
    position: int = 0
    blocks: set[int] = field(default_factory=set)
    coming: set[Message] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    received: dict[int, frozenset[int]] = field(default_factory=dict)
    sums: dict[int, frozenset[int]] = field(default_factory=dict)
    leaving: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks.add(self.program.rank)

    @property
    def step(self) -> RingStep | None:
        """What comes next, if anything."""
        return self.program.steps[self.position] if self.position < len(self.program.steps) else None

    def refuse(self, why: str) -> NoReturn:
        """The step at hand breaks a rule."""
        _refuse(self.program, self.position, why)

    def attend(self, owner: int) -> None:
        rank = self.program.rank
        if owner not in self.blocks:
            self.refuse(f"the keys of rank {owner} are not there")
        if owner in self.computed:
            self.refuse(f"the keys of rank {owner} were attended before")
        if not self.needs.table[rank][owner]:
            self.refuse(f"rank {rank} sees nothing of the keys of rank {owner}")
        self.computed.add(owner)

    def sum(self, step: Sum) -> None:
        ranks: frozenset[int] = frozenset()
        if step.adds_own:
            if step.owner not in self.computed:
                self.refuse("the own addend is not there")
            ranks |= {self.program.rank}
        if step.adds_received:
            if step.owner not in self.received:
                self.refuse("no addend has come")
            other = self.received.pop(step.owner)
            if ranks & other:
                self.refuse(f"the addend of rank {self.program.rank} is in it twice")
            ranks |= other
        if step.owner in self.sums:
            self.refuse("it was summed before")
        self.sums[step.owner] = ranks

    def post(self, message: Message) -> None:
        self.coming.add(message)
        foreign = sum(message.tensor == KV for message in self.coming) + len(self.blocks - {self.program.rank})
        if foreign > MAX_FOREIGN_BLOCKS:
            self.refuse(f"{foreign} blocks of others at once, above {MAX_FOREIGN_BLOCKS}")

    def send(self, message: Message) -> frozenset[int]:
        owner = message.piece.owner
        self.leaving.append(message)
        if message.tensor == KV:
            if owner not in self.blocks:
                self.refuse(f"the keys of rank {owner} are not there")
            return frozenset()
        if owner not in self.sums:
            self.refuse(f"the sum for rank {owner} is not there")
        return self.sums[owner]

    def receive(self, message: Message, ranks: frozenset[int]) -> None:
        self.coming.remove(message)
        owner = message.piece.owner
        if message.tensor == DKV:
            if owner in self.received:
                self.refuse(f"a sum for rank {owner} has come before")
            self.received[owner] = ranks
            return
        # What was at hand is done with: the next block is attended from now on.
        self.blocks = {self.program.rank, owner}

    def check_complete(self) -> None:
        """All that has to be was computed, and every gradient came home."""
        rank, table = self.program.rank, self.needs.table
        for owner, is_needed in enumerate(table[rank]):
            if is_needed and owner not in self.computed:
                self.refuse(f"the keys of rank {owner} were never attended, which rank {rank} sees")
        if self.leaving:
            self.refuse(f"{self.leaving[0]} was never flushed")
        if self.program.direction == "forward":
            return
        wanted = {other for other in range(self.needs.degree) if table[other][rank]}
        found = self.sums.get(rank, frozenset())
        if found != wanted:
            self.refuse(f"the gradient for its keys is of ranks {sorted(found)}, where {sorted(wanted)} see them")
        if self.received:
            self.refuse(f"a sum for rank {next(iter(self.received))} came and was never added")


def _run(ranks: Sequence[_Rank]) -> None:
    """Take steps wherever one can be taken, until all are done."""
    flying: dict[Message, frozenset[int]] = {}
    while sum(_advance(rank, ranks, flying) for rank in ranks):
        pass
    stuck = [f"rank {rank.program.rank} at step {rank.position} ({rank.step})" for rank in ranks if rank.step]
    if stuck:
        raise ScheduleError(f"ring attention {ranks[0].program.direction} never ends: {', '.join(stuck)}")
    for rank in ranks:
        rank.check_complete()


def _advance(rank: _Rank, ranks: Sequence[_Rank], flying: dict[Message, frozenset[int]]) -> bool:
    """Go on until something has to be waited for; whether any step was taken."""
    start = rank.position
    while (step := rank.step) is not None and _can_take(step, rank, ranks, flying):
        match step:
            case Recv(message):
                rank.post(message)
            case Send(message):
                flying[message] = rank.send(message)
            case Wait(message):
                rank.receive(message, flying.pop(message))
            case Flush(tensor):
                rank.leaving = [message for message in rank.leaving if message.tensor != tensor]
            case Attend(owner):
                rank.attend(owner)
            case Sum():
                rank.sum(step)
        rank.position += 1
    return rank.position > start


def _can_take(step: RingStep, rank: _Rank, ranks: Sequence[_Rank], flying: dict[Message, frozenset[int]]) -> bool:
    """A receive needs its send, and the end of a send its receive."""
    match step:
        case Wait(message):
            return message in flying
        case Flush(tensor):
            left = [message for message in rank.leaving if message.tensor == tensor]
            return all(message not in flying or message in ranks[message.target].coming for message in left)
    return True


def _refuse(program: RingProgram, position: int, why: str) -> NoReturn:
    at_end = position >= len(program.steps)
    where = "at the end" if at_end else f"step {position} ({program.steps[position]})"
    raise ScheduleError(f"ring attention {program.direction}, rank {program.rank}, {where}: {why}")
