"""The collective GEMMs of one model: which schedule each pass of each linear runs, over which transport, and how long
its host waited.
"""

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from plait.comm.mesh import Mesh
from plait.config.overlap import OverlapConfig
from plait.overlap.ahead import Begun, Next, put_begun, take_begun
from plait.overlap.choice import FUSED
from plait.overlap.chooser import Chooser, Chosen
from plait.overlap.execute import (
    Addends,
    Instrument,
    Outcome,
    Rows,
    Sessions,
    Start,
    check_agreement,
    open_sessions,
    take_steps,
)
from plait.overlap.fused import run_fused
from plait.overlap.predict import Before
from plait.overlap.receipt import Receipt, check_strict
from plait.overlap.site import Pass
from plait.overlap.transport.base import Transport
from plait.overlap.transport.piecewise import PiecewiseGather
from plait.overlap.transport.ring import RingTransport
from plait.schedule.pair import build_pair
from plait.schedule.program import can_begin
from plait.schedule.step import Program

_MAX_PASSES = 4096
"""Of 32 layers those of sixteen token counts: batches of ever new sizes are not to fill the memory."""

_WATCHED_RUNS = 16
"""Two events on the computing stream for every wait are cheap, and not to be kept for ever."""


class CollectiveMatmul:
    """Runs every pass of a model's parallel linears, each as chosen when it first ran.

    Every rank of the tp axis has to make it, and to run the same passes in the same order.

    Attributes:
        receipt: what was asked, what runs and why, and what it cost, for every pass that ran.
        transports: by name.
        chosen: what runs each pass that has run, or may be begun for.
        instrument: what looks on, if anything does.
        running: the program of the latest run.
        column: of the latest pass forward of column linears: the backward that will follow that of the next row linear,
            and what it gathers.
        begun_by: by pass, the one whose gather it has begun.

    Raises:
        ConfigError: a transport that was asked for by name and cannot serve these ranks.
    """

    def __init__(self, mesh: Mesh, config: OverlapConfig) -> None:
        self.receipt = Receipt()
        self._chooser = Chooser(mesh, config, self.receipt)
        self.axis, self.device = self._chooser.axis, self._chooser.device
        self.transports = self._chooser.transports
        self.chosen: dict[Pass, Chosen] = {}
        self.instrument: Instrument | None = None
        self.running: Program | None = None
        self.column: Next | None = None
        self.begun_by: dict[Pass, Pass] = {}
        self._pairs: dict[Pass, tuple[Chosen, tuple[Program, Program]]] = {}
        self._in_vain: set[Pass] = set()
        self._is_checked = not config.strict

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: the copy of a model talks over the transports that there are."""
        return self

    def run(
        self,
        what: Pass,
        *,
        gemms: Mapping[str, Rows],
        shard: Tensor | None = None,
        addends: Addends | None = None,
        following: Next | None = None,
        this: Next | None = None,
    ) -> Outcome:
        """Run `what` with the GEMMs given: `shard` is gathered where something is, `addends` are reduced.

        `following` is the pass that will be next, if all goes as in the forward; its gather may be begun already. That
        pass says by `this` that it is the one.
        """
        begun = take_begun(self.axis.group, this)
        try:
            outcome, ahead = self._run(what, gemms, shard, addends, begun, following)
        except BaseException:
            # What is on its way is nobody's now, and is to be missed by whoever comes next.
            self._end_ahead()
            raise
        if ahead is not None:
            assert self.axis.group is not None, self.axis
            put_begun(self.axis.group, ahead)
        return outcome

    def _run(
        self,
        what: Pass,
        gemms: Mapping[str, Rows],
        shard: Tensor | None,
        addends: Addends | None,
        begun: Begun | None,
        following: Next | None,
    ) -> tuple[Outcome, Begun | None]:
        what = self._chooser.tell_apart(what, gemms)
        chosen = self.chosen.get(what)
        if chosen is not None and not self._is_checked:
            # Only when passes repeat is all known that differs, and it is told at once.
            self._is_checked = True
            check_strict(self.receipt)
        if chosen is None or (chosen.is_rest and begun is None):
            chosen = self._keep(what, self._chooser.choose(what, gemms, shard, addends))
        pair = None if following is None or begun is not None else self._find_pair(what, chosen, following)
        program = begun.program if begun is not None else chosen.program if pair is None else pair[0]
        self.running, instrument = program, self.instrument
        if instrument is not None:
            gemms = instrument.enter(what, gemms)
        # What was begun was agreed on when it was; another collective might overtake it on some ranks.
        if begun is None and program.flows:
            dtypes = (None if shard is None else shard.dtype, None if addends is None else addends.dtype)
            if chosen.ran.get(dtypes) is not program:
                name = FUSED if chosen.is_fused else chosen.transport.capability.name
                ahead_shard = None if program.ahead is None or following is None else following.shard
                check_agreement(program, name, self.axis, shard, addends, what.site.label, ahead_shard)
                chosen.ran[dtypes] = program
        ahead = None
        if chosen.is_fused:
            outcome = run_fused(chosen.work, gemms, self.axis, shard, what.site.label)
        else:
            start = None if following is None else Start(following.shard, following.what.site.label)
            source = shard if begun is None else begun.session
            sessions = open_sessions(program, chosen.transport, source, addends, what.site.label, start)
            outcome = self._take_steps(program, chosen, gemms, sessions)
            if begun is not None:
                begun.transport.end_ahead()
            if sessions.ahead is not None and following is not None and pair is not None:
                ahead = self._leave(sessions.ahead, following, chosen.transport, pair[1])
        if instrument is not None:
            instrument.leave()
        return outcome, ahead

    def _take_steps(self, program: Program, chosen: Chosen, gemms: Mapping[str, Rows], sessions: Sessions) -> Outcome:
        """Take them, and note how long this rank waited: its host, or in the first runs the stream of its device."""
        transport, line = chosen.transport, chosen.line
        if self.device.type == "cpu":
            outcome = take_steps(program, transport, gemms, sessions, self.instrument)
            assert outcome.exposed_s is not None, line.label
            line.add_measurement(outcome.exposed_s)
        elif isinstance(transport, RingTransport) and line.num_measured < _WATCHED_RUNS:
            with transport.measure_stalls(self.device) as stalls:
                outcome = take_steps(program, transport, gemms, sessions, self.instrument)
            line.add_stalls(stalls.read_total_s)
        else:
            outcome = take_steps(program, transport, gemms, sessions, self.instrument)
        return outcome

    def _keep(self, what: Pass, chosen: Chosen) -> Chosen:
        """Know it the next time, and of what was kept for long forget what must be chosen again if it comes again."""
        if (replaced := self.chosen.get(what)) is not None:
            self.receipt.remove_line(replaced.line)
        self.chosen[what] = chosen
        if len(self.chosen) > _MAX_PASSES:
            oldest = next(iter(self.chosen))
            self.receipt.drop_line(self.chosen.pop(oldest).line)
            self.begun_by.pop(oldest, None)
            self._pairs.pop(oldest, None)
            self._in_vain.discard(oldest)
        return chosen

    def _find_pair(self, what: Pass, chosen: Chosen, following: Next) -> tuple[Program, Program] | None:
        """The programs of a pass and of the following one, if the first can begin the gather of the second."""
        if following.what in self._in_vain or not isinstance(chosen.transport, RingTransport):
            return None
        if chosen.is_fused or not can_begin(chosen.work, chosen.program.method):
            return None
        later = self.chosen.get(following.what)
        if later is None:
            before = Before(chosen.line.choice.way, chosen.work, what.site)
            later = self._chooser.choose(following.what, {}, following.shard, following.addends, before)
            self._keep(following.what, later)
        if later.transport is not chosen.transport or not chosen.half.can_begin(later.half):
            return None
        self.begun_by[what] = following.what
        known = self._pairs.get(what)
        if known is None or known[0] is not later:
            self._pairs[what] = known = (later, build_pair(chosen.half, later.half, self.axis.rank))
        return known[1]

    def _leave(self, session: PiecewiseGather, following: Next, transport: Transport, program: Program) -> Begun:
        """What the following pass is to find of what was begun for it."""
        assert isinstance(transport, RingTransport), transport
        transport.leave_ahead(following.shard.device)
        return Begun(following.what, following, session, transport, program, self._in_vain)

    def _end_ahead(self) -> None:
        for transport in self.transports.values():
            if isinstance(transport, RingTransport):
                transport.end_ahead()
