"""Agreement on schedules, before the first run of each: ranks that cut rows differently would wait for messages that
never come, or take one for another.
"""

from collections import defaultdict
from hashlib import blake2b
from weakref import WeakKeyDictionary

import torch

from plait.comm import collectives, trace
from plait.comm.agree import share_over
from plait.comm.mesh import Axis
from plait.errors import ScheduleError
from plait.schedule.step import Flow, Program
from plait.sharding import build_split

_DIGEST_BYTES = 16

_MAX_AGREED = 1 << 15
"""Batches of ever new sizes are not to fill the memory."""

Row = tuple[int, torch.dtype]
"""Width and dtype of a tensor that moves."""

_agreed: "WeakKeyDictionary[Axis, set[object]]" = WeakKeyDictionary()


def check_same_schedule(
    program: Program, rows: tuple[Row, ...], transport: str, axis: Axis, device: torch.device, label: str
) -> None:
    """Compare what is about to run with the other ranks of `axis`, once for each schedule; `rows` go with its flows
    and that which it begins.

    Every rank has to call it, which is why the answer is remembered by what all of them know alike. It is one small
    collective, counted among those of the rank, but in no trace: a contract promises what a schedule moves.

    Raises:
        ScheduleError: ranks differ; on all of them.
    """
    if axis.group is None:
        return
    agreed = _agreed.setdefault(axis, set())
    schedule = (label, transport, program.method, program.chunks, program.flows, program.gemms, program.ahead, rows)
    if schedule in agreed:
        return
    text = _describe(program, rows, transport)
    digest = blake2b(f"{label}: {text}".encode(), digest_size=_DIGEST_BYTES).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    with trace.aside():
        # A label of its own would differ where schedules do, and be what the ranks are told of instead of them.
        split = build_split(axis.degree * _DIGEST_BYTES, axis.degree)
        digests = collectives.all_gather(own, axis, split, label="schedule").view(axis.degree, -1)
        if not torch.equal(digests, own.expand_as(digests)):
            raise _build_error(share_over((label, text), axis, device))
    if len(agreed) >= _MAX_AGREED:
        agreed.clear()  # on all ranks at once, as all of them agree on the same in the same order
    agreed.add(schedule)


def _describe(program: Program, rows: tuple[Row, ...], transport: str) -> str:
    moved = " and ".join(
        f"{flow.kind} of {flow.tensor} [{flow.split.size} = {' + '.join(map(str, flow.split.lengths))}, {width}] "
        f"{str(dtype).removeprefix('torch.')}"
        for flow, (width, dtype) in zip(_list_flows(program), rows, strict=True)
    )
    how = f"{program.method} over {transport} in {program.chunks} chunks"
    return f"{how}, {moved or 'nothing moved'} beside {' and '.join(program.gemms) or 'no GEMM'}"


def _list_flows(program: Program) -> tuple[Flow, ...]:
    """What moves, and what begins to move for the next program."""
    return program.flows if program.ahead is None else (*program.flows, program.ahead.flow)


def _build_error(said: list[tuple[str, str]]) -> ScheduleError:
    by_schedule: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, what in enumerate(said):
        by_schedule[what].append(rank)
    listed = "".join(
        f"\n  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {label}: {text}"
        for (label, text), ranks in by_schedule.items()
    )
    return ScheduleError(
        f"the ranks would not run one schedule:{listed}",
        hint="the model, the config and above all overlap.* have to be the same on every rank",
    )
