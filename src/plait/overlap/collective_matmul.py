"""The collective GEMMs of one model: which schedule each pass of each linear runs, over which transport, and how long
its host waited.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from plait.comm.mesh import Mesh
from plait.comm.shared.arena import NoRoom
from plait.config.overlap import OverlapConfig
from plait.dtype import DType
from plait.overlap.choice import FUSED, LIBRARY
from plait.overlap.execute import Addends, Observer, Outcome, Rows, check_agreement, execute
from plait.overlap.fused import can_fuse, find_obstacle, run_fused
from plait.overlap.probe import find_rates
from plait.overlap.rates import Rates
from plait.overlap.receipt import Line, Receipt
from plait.overlap.select import check_transport, choose, needs_rates
from plait.overlap.site import Site
from plait.overlap.transport.base import Transport
from plait.overlap.transport.library import LibraryTransport
from plait.overlap.transport.ring import RingTransport
from plait.overlap.transport.shm import SharedMemoryTransport, describe_lack
from plait.overlap.transport.symm_mem import CAPABILITY, why_not
from plait.schedule.program import build_program
from plait.schedule.step import Method, Program
from plait.schedule.work import Operation, Work, derive_work
from plait.sharding import Kind, Transition


@dataclass(frozen=True)
class Pass:
    """One pass through one linear: what decides its schedule.

    Attributes:
        transition: the boundary's row of the table of transitions.
        num_rows: T, of all ranks.
        needs_dgrad: of a backward, whether the input's gradient is wanted.
        needs_wgrad: of a backward, whether a weight's is.
    """

    operation: Operation
    site: Site
    transition: Transition
    num_rows: int
    needs_dgrad: bool = True
    needs_wgrad: bool = True


@dataclass(frozen=True)
class Chosen:
    """What runs a pass, and its line of the receipt.

    Attributes:
        program: the steps of the pass; of one that a fused operation does, the whole collectives that it amounts to.
        is_fused: whether a fused operation does it wherever it can (`plait.overlap.fused`).
    """

    work: Work
    program: Program
    transport: Transport
    line: Line
    is_fused: bool = False
    ran: set[tuple[torch.dtype | None, torch.dtype | None]] = field(default_factory=set)
    """With which dtypes, of what is gathered and of what is reduced, it has run: all ranks agree on that."""


class Instrument(Observer, Protocol):
    """What a benchmark puts between the passes and their steps."""

    def enter(self, what: Pass, gemms: Mapping[str, Rows]) -> Mapping[str, Rows]:
        """Told of a run that begins; what it returns is what the run multiplies with."""

    def leave(self) -> None:
        """Told that the run has ended."""


class CollectiveMatmul:
    """Runs every pass of a model's parallel linears, each as chosen when it first ran.

    Every rank of the tp axis has to make it, and to run the same passes in the same order.

    Attributes:
        receipt: what was asked, what runs and why, and what it cost, for every pass that ran.
        transports: by name.
        chosen: what runs each pass that has run.
        instrument: what looks on, if anything does.

    Raises:
        ConfigError: a transport that was asked for by name and cannot serve these ranks.
    """

    def __init__(self, mesh: Mesh, config: OverlapConfig) -> None:
        if config.policy != "disabled" and config.transport in ("auto", "shm"):
            mesh.share_memory()
        self.axis = mesh.tp
        self.device = mesh.device
        self.config = config
        self.receipt = Receipt()
        self.transports: dict[str, Transport] = {LIBRARY: LibraryTransport(self.axis)}
        if self.axis.group is not None:
            self.transports["ring"] = RingTransport(self.axis)
        if self.axis.shared is not None:
            self.transports["shm"] = SharedMemoryTransport(self.axis)
        self._reachable = {"shm": describe_lack(self.axis), **dict.fromkeys(self.transports)}
        if config.policy != "disabled" and config.transport == FUSED:
            # Only where it is asked for by name: what it costs is not measured, so `auto` cannot weigh it.
            self._reachable[FUSED] = why_not(self.axis, self.device)
        self._rates: dict[DType, Rates] = {}
        check_transport(config, self._reachable)
        self.chosen: dict[Pass, Chosen] = {}
        self.instrument: Instrument | None = None

    def run(
        self, what: Pass, *, gemms: Mapping[str, Rows], shard: Tensor | None = None, addends: Addends | None = None
    ) -> Outcome:
        """Run `what` with the GEMMs given: `shard` is gathered where something is, `addends` are reduced."""
        chosen = self.chosen.get(what)
        if chosen is None:
            self.chosen[what] = chosen = self._choose(what, gemms, shard, addends)
        instrument = self.instrument
        if instrument is not None:
            gemms = instrument.enter(what, gemms)
        dtypes = (None if shard is None else shard.dtype, None if addends is None else addends.dtype)
        is_agreed = dtypes in chosen.ran
        label = what.site.label
        if chosen.is_fused and can_fuse(chosen.work, gemms):
            if not is_agreed:
                check_agreement(chosen.program, FUSED, self.axis, shard, addends, label)
            outcome = run_fused(chosen.work, gemms, self.axis, shard, label)
        else:
            outcome = execute(
                chosen.program, chosen.transport, gemms=gemms, shard=shard, addends=addends, label=label,
                is_agreed=is_agreed, observer=instrument,
            )  # fmt: skip
        if not is_agreed:
            chosen.ran.add(dtypes)
        if instrument is not None:
            instrument.leave()
        # The host of another device only enqueues: `RingTransport.measure_stalls` sees what its stream waits.
        chosen.line.add_measurement(outcome.exposed_s if self.device.type == "cpu" else None)
        return outcome

    def _choose(self, what: Pass, gemms: Mapping[str, Rows], shard: Tensor | None, addends: Addends | None) -> Chosen:
        work = derive_work(
            what.operation, what.transition, what.num_rows, self.axis.degree,
            needs_dgrad=what.needs_dgrad, needs_wgrad=what.needs_wgrad,
        )  # fmt: skip
        rates = self._find_rates(what.site.dtype) if work.flows and needs_rates(self.config) else None
        capable = {name: transport.capability.methods for name, transport in self.transports.items()}
        capable[FUSED] = CAPABILITY.methods
        reachable = dict(self._reachable)
        if FUSED in reachable:
            reachable[FUSED] = find_obstacle(work, gemms, getattr(torch, what.site.dtype), self.axis)
        choice = choose(self.config, what.site, work, reachable=reachable, rates=rates, capable=capable)
        lack = self._reserve(work, shard, addends, what.site.label) if choice.transport == "shm" else None
        if lack is not None:
            # For this pass only: there may well be memory for smaller ones.
            reachable["shm"] = lack
            check_transport(self.config, reachable)
            choice = choose(self.config, what.site, work, reachable=reachable, rates=rates, capable=capable)
        is_fused = choice.transport == FUSED
        method, transport = (Method.NONE, LIBRARY) if is_fused else (choice.method, choice.transport)
        program = build_program(work, method, choice.chunks, self.axis.rank)
        line = self.receipt.add_line(what.operation, what.site, work, choice, program)
        return Chosen(work, program, self.transports[transport], line, is_fused)

    def _reserve(self, work: Work, shard: Tensor | None, addends: Addends | None, label: str) -> str | None:
        """Have the shared memory that `work` needs; why there is none."""
        transport = self.transports["shm"]
        assert isinstance(transport, SharedMemoryTransport), transport
        lack = None
        for flow in work.flows:
            if flow.kind is Kind.ALL_GATHER and shard is not None:
                lack = lack or transport.reserve(flow, shard.shape[1], shard.dtype, label)
            elif addends is not None:
                lack = lack or transport.reserve(flow, addends.width, addends.dtype, label)
        return lack

    def _find_rates(self, dtype: DType) -> Rates:
        if dtype not in self._rates:
            self._rates[dtype] = self._measure_rates(getattr(torch, dtype))
        return self._rates[dtype]

    def _measure_rates(self, dtype: torch.dtype) -> Rates:
        try:
            return find_rates(self.transports, self.axis, device=self.device, dtype=dtype)
        except NoRoom as error:
            # Where there is too little to measure it, there is too little for anything.
            self._reachable["shm"] = error.lack
            check_transport(self.config, self._reachable)
            del self.transports["shm"]
            return self._measure_rates(dtype)
