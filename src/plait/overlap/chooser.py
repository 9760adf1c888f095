"""What runs each pass: the transports there are between these ranks, what they cost, and the choice among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from plait.comm.mesh import Mesh
from plait.comm.shared.arena import NoRoom
from plait.config.overlap import OverlapConfig
from plait.dtype import DType
from plait.overlap.choice import FUSED, LIBRARY
from plait.overlap.execute import Addends, Rows
from plait.overlap.fused import can_fuse, find_obstacle
from plait.overlap.machine.probe import find_rates
from plait.overlap.machine.rates import Rates
from plait.overlap.predict import Before
from plait.overlap.receipt import Line, Receipt
from plait.overlap.select import check_transport, choose, needs_rates
from plait.overlap.site import Pass
from plait.overlap.transport.base import Transport
from plait.overlap.transport.library import LibraryTransport
from plait.overlap.transport.ring import RingTransport
from plait.overlap.transport.shm import SharedMemoryTransport, describe_lack
from plait.overlap.transport.symm_mem import CAPABILITY, why_not
from plait.schedule.pair import Half
from plait.schedule.program import build_program
from plait.schedule.step import Method, Program
from plait.schedule.work import Work, derive_work
from plait.sharding import Kind


@dataclass(frozen=True)
class Chosen:
    """What runs a pass, and its line of the receipt.

    Attributes:
        program: the steps of the pass; of one that a fused operation does, the whole collectives that it amounts to.
        is_fused: whether a fused operation does it (`plait.overlap.fused`).
        is_rest: whether it was chosen for what is left where the gather is begun before.
    """

    work: Work
    program: Program
    transport: Transport
    line: Line
    is_fused: bool = False
    is_rest: bool = False
    ran: dict[tuple[torch.dtype | None, torch.dtype | None], Program] = field(default_factory=dict)
    """By the dtypes of what is gathered and of what is reduced, the program that all ranks last agreed on."""

    @property
    def half(self) -> Half:
        """It as one of a pair of passes."""
        return Half(self.work, self.program.method, self.program.chunks)


class Chooser:
    """Chooses what runs the passes of one model, and writes it into its receipt.

    Attributes:
        transports: by name.

    Raises:
        ConfigError: a transport that was asked for by name and cannot serve these ranks.
    """

    def __init__(self, mesh: Mesh, config: OverlapConfig, receipt: Receipt) -> None:
        if config.may_share_memory:
            mesh.share_memory()
        self.axis = mesh.tp
        self.device = mesh.device
        self.config = config
        self.receipt = receipt
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

    def tell_apart(self, what: Pass, gemms: Mapping[str, Rows]) -> Pass:
        """The pass, told apart from one of the same linear that fused operations can do and this not."""
        if FUSED not in self._reachable:
            return what
        work = self._derive_work(what)
        is_plain = what.site.precision is None
        return replace(what, can_be_fused=not work.flows or (is_plain and can_fuse(work, gemms)))

    def choose(
        self,
        what: Pass,
        gemms: Mapping[str, Rows],
        shard: Tensor | None,
        addends: Addends | None,
        before: Before | None = None,
    ) -> Chosen:
        """What runs `what`; where the pass before is to begin its gather, the choice is for the rest."""
        work = self._derive_work(what)
        rates = self._find_rates(what.site.dtype) if work.flows and needs_rates(self.config) else None
        capable = {name: transport.capability.methods for name, transport in self.transports.items()}
        capable[FUSED] = CAPABILITY.methods
        reachable = dict(self._reachable)
        if FUSED in reachable:
            reachable[FUSED] = find_obstacle(work, gemms, what.site, self.axis)
        pick = partial(choose, self.config, what.site, work, reachable=reachable, rates=rates, capable=capable)
        choice = pick(before=before)
        if before is not None and not before.begins(choice.way, work):
            before, choice = None, pick()
        lack = self._reserve(work, shard, addends, what.site.label) if choice.transport == "shm" else None
        if lack is not None:
            # For this pass only: there may well be memory for smaller ones.
            reachable["shm"] = lack
            if choice.method is not Method.NONE:
                check_transport(self.config, reachable)
            choice = pick(before=before)
        is_fused = choice.transport == FUSED
        method, transport = (Method.NONE, LIBRARY) if is_fused else (choice.method, choice.transport)
        program = build_program(work, method, choice.chunks, self.axis.rank)
        line = self.receipt.add_line(what.operation, what.site, work, choice, program)
        return Chosen(work, program, self.transports[transport], line, is_fused, is_rest=before is not None)

    def _derive_work(self, what: Pass) -> Work:
        return derive_work(
            what.operation, what.transition, what.num_rows, self.axis.degree, what.unit,
            needs_dgrad=what.needs_dgrad, needs_wgrad=what.needs_wgrad,
        )  # fmt: skip

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
