"""Proof that the programs of all ranks do a work: no row is lost, repeated, read too early or waited for in vain.

The programs are run on symbols: a row is there or not, and a sum is the list of the ranks whose addends are in it, in
the order in which they were added. What one run cannot show follows from the rounds of the messages. Before a rank
sends in round r it has waited for rounds before r only, so whatever waits, waits for something of an earlier round, and
there is no circle: not where a send ends only when it is received (rendezvous), nor where messages have no tags and are
told apart by their order (NCCL).
"""

from collections.abc import Sequence
from dataclasses import replace

from plait.errors import ScheduleError
from plait.schedule.step import Add, Collect, Content, Flush, Message, Method, Multiply, Program, Recv, Send, Step, Wait
from plait.schedule.work import Work
from plait.verify.static.symbols import Cells, Rank, Sum, refuse


def check_schedule(programs: Sequence[Program], work: Work) -> None:
    """Prove that `programs`, those of ranks 0, 1, ..., do `work`.

    Raises:
        ScheduleError: they do not; the message names the rank, the step and the rows.
    """
    _check_alike(programs, work)
    for program in programs:
        _check_messages(program)
        _check_rounds(program)
        _check_end(program)
        _check_memory(program, work)
    _check_matched(programs)
    _run([Rank(program, work, cells) for cells in (Cells(programs, work),) for program in programs])


def check_pair(first: Sequence[Program], second: Sequence[Program], works: tuple[Work, Work]) -> None:
    """Check two schedules, one after the other, of which the first begins the gather of the second.

    Without what it begins, the first has to hold; the second has to hold with that in front. And in the one order of
    rounds, what is begun goes behind all else of the first and before all else of the second.

    Raises:
        ScheduleError: what does not hold, on which rank.
    """
    tensors = [program.ahead.flow.tensor if program.ahead else None for program in first]
    alone, whole = [], []
    for one, other, tensor in zip(first, second, tensors, strict=True):
        begun = [step for step in one.steps if _is_of(step, tensor)]
        alone.append(replace(one, steps=tuple(step for step in one.steps if not _is_of(step, tensor)), ahead=None))
        # All receives first, as in one program: in truth what was sent ahead had all of the first program to go off.
        posted = [step for step in (*begun, *other.steps) if isinstance(step, Recv)]
        rest = [step for step in (*begun, *other.steps) if not isinstance(step, Recv)]
        whole.append(replace(other, steps=(*posted, *rest), is_begun=False))
        _check_between(one, other, begun)
    check_schedule(alone, works[0])
    check_schedule(whole, works[1])


def _is_of(step: Step, tensor: str | None) -> bool:
    return isinstance(step, Recv | Send) and step.message.tensor == tensor


def _check_between(first: Program, second: Program, begun: Sequence[Step]) -> None:
    rounds = [step.message.round for step in begun if isinstance(step, Recv | Send)]
    before = [step.message.round for step in first.steps if isinstance(step, Recv | Send) and step not in begun]
    behind = [step.message.round for step in second.steps if isinstance(step, Recv | Send)]
    for earlier, later in ((before, rounds), (rounds, behind)):
        if earlier and later and max(earlier) >= min(later):
            raise ScheduleError(
                f"rank {first.rank}: round {min(later)} is not behind round {max(earlier)}, "
                "so what is begun for the next program would not keep its place"
            )


def count_buffered_rows(program: Program) -> int:
    """The most rows of others' addends that a rank has to have room for at once; gathered ones come in place."""
    rows, most = 0, 0
    for step in program.steps:
        match step:
            case Recv(Message(content=Content.ADDEND, piece=piece)):
                rows += len(piece.rows)
            case Add(piece=piece, ranks=ranks):
                rows -= len(piece.rows) * sum(rank != program.rank for rank in ranks)
        most = max(most, rows)
    return most


def _check_alike(programs: Sequence[Program], work: Work) -> None:
    """All ranks do the same work by the same schedule."""
    degrees = {flow.split.degree for flow in work.flows} or {len(programs)}
    if degrees != {len(programs)}:
        raise ScheduleError(f"{len(programs)} programs for a work of {' and '.join(map(str, degrees))} ranks")
    for rank, program in enumerate(programs):
        expected = (programs[0].method, programs[0].chunks, rank, work.flows, work.gemms)
        found = (program.method, program.chunks, program.rank, program.flows, program.gemms)
        for name, wanted, value in zip(("method", "chunks", "rank", "flows", "gemms"), expected, found, strict=True):
            if value != wanted:
                raise ScheduleError(f"program {rank} has another {name}: {value}, where {wanted} is due")


def _check_messages(program: Program) -> None:
    """Messages are this rank's own, and each receive is posted once, before anything is sent, and waited for once."""
    seen: set[Step] = set()
    has_sent = False
    for position, step in enumerate(program.steps):
        if not isinstance(step, Recv | Send | Wait):
            continue
        here, peer = step.message.target, step.message.source
        if isinstance(step, Send):
            here, peer, has_sent = peer, here, True
        if here != program.rank or peer == program.rank:
            refuse(program, position, f"is not a message of rank {program.rank}")
        if step in seen:
            refuse(program, position, "is a repetition")
        if isinstance(step, Recv) and has_sent:
            refuse(program, position, "is posted after a send, behind whose bytes it would wait")
        if isinstance(step, Wait) and Recv(step.message) not in seen:
            refuse(program, position, "nothing was posted to receive it")
        seen.add(step)
    for position, step in enumerate(program.steps):
        if isinstance(step, Recv) and Wait(step.message) not in seen:
            refuse(program, position, "is never waited for")


def _check_rounds(program: Program) -> None:
    """Rounds are in order: of sends as issued, of receives as posted; no send comes behind a wait for a later one."""
    last: dict[type[Step], int] = {}
    for position, step in enumerate(program.steps):
        if not isinstance(step, Recv | Send | Wait):
            continue
        number = step.message.round
        if not isinstance(step, Wait) and number <= last.get(type(step), -1):
            refuse(program, position, f"round {number} comes after round {last[type(step)]}")
        if isinstance(step, Send) and number <= last.get(Wait, -1):
            refuse(program, position, f"round {number} is sent after round {last[Wait]} was waited for")
        last[type(step)] = max(number, last.get(type(step), -1))


def _check_end(program: Program) -> None:
    """The library's collectives or messages, not both; and what was sent is flushed, last, once."""
    flushed: list[str] = []
    for position, step in enumerate(program.steps):
        if isinstance(step, Collect) != (program.method is Method.NONE) and not isinstance(step, Multiply):
            refuse(program, position, f"is no step of method {program.method}")
        if isinstance(step, Flush):
            flushed.append(step.tensor)
        elif flushed:
            refuse(program, position, f"comes after {flushed[-1]} was flushed")
    wanted = [] if program.method is Method.NONE else [flow.tensor for flow in program.flows]
    if sorted(flushed) != sorted(wanted):
        refuse(program, len(program.steps), f"flushed are {flushed}, where {wanted} move")


def _check_memory(program: Program, work: Work) -> None:
    """Every rank sums at most t - 1 addends of as many rows as any rank owns, and need have room for no more."""
    if work.reduce is not None:
        split = work.reduce.split
        bound, rows = (split.degree - 1) * split.longest, count_buffered_rows(program)
        if rows > bound:
            refuse(program, len(program.steps), f"receives up to {rows} rows at once, above (t - 1) * T/t = {bound}")


def _check_matched(programs: Sequence[Program]) -> None:
    """What is sent is received, and nothing else."""
    sent = {message for program in programs for message in program.messages_sent}
    for program in programs:
        for position, step in enumerate(program.steps):
            if isinstance(step, Recv) and step.message not in sent:
                refuse(program, position, "nobody sends it")
    received = {message for program in programs for message in program.messages_received}
    for program in programs:
        for position, step in enumerate(program.steps):
            if isinstance(step, Send) and step.message not in received:
                refuse(program, position, "nobody receives it")


def _run(ranks: Sequence[Rank]) -> None:
    """Take steps wherever one can be taken, until all are done."""
    flying: dict[Message, dict[int, Sum]] = {}
    while any(_advance(rank, flying) for rank in ranks) or _collect(ranks):
        pass
    stuck = [f"rank {rank.program.rank} at step {rank.position} ({rank.step})" for rank in ranks if rank.step]
    if stuck:
        raise ScheduleError(f"{ranks[0].program.method} schedule never ends: {', '.join(stuck)}")
    for rank in ranks:
        rank.check_complete()


def _advance(rank: Rank, flying: dict[Message, dict[int, Sum]]) -> bool:
    """Go on until something has to be waited for; whether any step was taken."""
    start = rank.position
    while rank.step is not None:
        match rank.step:
            case Multiply() as step:
                rank.multiply(step)
            case Send(message):
                flying[message] = rank.send(message)
            case Wait(message):
                if message not in flying:
                    break
                rank.receive(message, flying.pop(message))
            case Add() as step:
                rank.add(step)
            case Collect():
                break
        rank.position += 1
    return rank.position > start


def _collect(ranks: Sequence[Rank]) -> bool:
    """A library's collective, if all ranks have come to the same one."""
    steps = {rank.step for rank in ranks}
    if len(steps) != 1 or not isinstance(step := steps.pop(), Collect):
        return False
    for rank in ranks:
        rank.collect(step.tensor)
        rank.position += 1
    return True
