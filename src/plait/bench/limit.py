"""What no schedule can beat, and what the one that runs could reach at best on this machine."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.bench.rounds import Spread
from plait.overlap.chooser import Chosen
from plait.overlap.collective_matmul import CollectiveMatmul
from plait.overlap.execute import Addends, execute
from plait.overlap.site import Pass, Site
from plait.schedule.costs import Costs, estimate_collective_s
from plait.schedule.pair import build_pair, join_costs, join_pair
from plait.schedule.program import build_program
from plait.schedule.simulate import simulate
from plait.schedule.step import Content, Flow, Method
from plait.schedule.timeline import Timeline
from plait.schedule.work import Work
from plait.sharding import Interval, Kind

GemmTimes = Mapping[tuple[Pass, str], Sequence[float]]
"""How long each GEMM took with nothing moved, in every round."""


class Movement:
    """All that a model's passes move, over the same transports, serially and with nothing computed."""

    def __init__(self, matmul: CollectiveMatmul) -> None:
        self._matmul = matmul

    def __call__(self) -> None:
        """Move it once."""
        for what, chosen in self._matmul.chosen.items():
            self._run(what, chosen)

    def _run(self, what: Pass, chosen: Chosen) -> None:
        work, axis, site = chosen.work, self._matmul.axis, what.site
        serial = Method.NONE in chosen.transport.capability.methods
        program = build_program(work, Method.NONE, 1, axis.rank) if serial else chosen.program
        shard = addends = None
        if work.gather is not None:
            shard = _build_shard(site, work, work.gather.split.lengths[axis.rank])
        if work.reduce is not None:
            addends = Addends(site.width, getattr(torch, site.dtype), torch.device("cpu"))
        execute(
            program, chosen.transport, gemms=dict.fromkeys(work.gemms, _compute_nothing), shard=shard, addends=addends,
            label=f"{site.label} alone",
        )  # fmt: skip


def _build_shard(site: Site, work: Work, num_rows: int) -> Tensor:
    """Rows as they are gathered: in the dtype of the site, or in codes and scales."""
    if site.precision is None:
        return torch.zeros(num_rows, site.width, dtype=getattr(torch, site.dtype))
    return torch.zeros(num_rows, site.gathered_row_bytes(work), dtype=torch.uint8)


def _compute_nothing(rows: Interval, full: Tensor | None, partial: Tensor | None, *, accumulates: bool) -> None:
    """A GEMM of no time."""


@dataclass(frozen=True)
class Limit:
    """Bounds of one step, from what was measured alone.

    Attributes:
        compute_s: the local work with nothing moved.
        communication_s: all that moves beside GEMMs, with nothing computed.
        schedule_s: what the schedules that run take on a simulated clock at these rates: the larger of the two, and
            what their order exposes at the head and tail of every pass.
    """

    compute_s: float
    communication_s: float
    schedule_s: float

    @property
    def most_s(self) -> float:
        """The larger: no schedule is faster."""
        return max(self.compute_s, self.communication_s)

    def to_json(self) -> dict[str, Any]:
        """For files and programs."""
        return {
            "compute_s": self.compute_s,
            "communication_s": self.communication_s,
            "communication_over_compute": self.communication_s / self.compute_s,
            "max_s": self.most_s,
            "head_and_tail_s": self.schedule_s - self.most_s,
            "schedule_s": self.schedule_s,
        }


def derive_limit(
    matmul: CollectiveMatmul, gemm_s: GemmTimes, compute_s: Sequence[float], communication_s: Sequence[float]
) -> tuple[Limit, list[Timeline]]:
    """The limit of what `matmul` runs, and its passes on the simulated clock in the order in which they first ran."""
    alone_s = {key: statistics.median(values) for key, values in gemm_s.items()}
    moved_s = Spread.of(communication_s).median
    rate = _count_bytes(matmul) / moved_s if moved_s else float("inf")
    begun = set(matmul.begun_by.values())
    timelines = [_simulate(what, matmul, alone_s, rate) for what in matmul.chosen if what not in begun]
    median_s = Spread.of(compute_s).median
    other_s = max(0.0, median_s - sum(alone_s.values()))
    return Limit(median_s, moved_s, other_s + sum(each.duration_s for each in timelines)), timelines


def _simulate(
    what: Pass, matmul: CollectiveMatmul, alone_s: Mapping[tuple[Pass, str], float], bytes_per_s: float
) -> Timeline:
    """A pass, and the one that it begins something for together with it."""
    degree, following = matmul.axis.degree, matmul.begun_by.get(what)
    costs = _derive_costs(what, matmul.chosen[what], alone_s, bytes_per_s)
    if following is None:
        chosen = matmul.chosen[what]
        program = chosen.program
        programs = [build_program(chosen.work, program.method, program.chunks, rank) for rank in range(degree)]
        return simulate(programs, costs)
    later = _derive_costs(following, matmul.chosen[following], alone_s, bytes_per_s)
    halves = matmul.chosen[what].half, matmul.chosen[following].half
    return simulate([join_pair(*build_pair(*halves, rank)) for rank in range(degree)], join_costs(costs, later))


def _derive_costs(what: Pass, chosen: Chosen, alone_s: Mapping[tuple[Pass, str], float], bytes_per_s: float) -> Costs:
    work = chosen.work
    row_bytes = {flow.tensor: _row_bytes(what, work, flow) for flow in work.flows}
    return Costs(
        {gemm: partial(_scale, alone_s[what, gemm] / max(1, work.num_rows)) for gemm in work.gemms},
        row_bytes,
        bytes_per_s=bytes_per_s,
        collect_s={
            flow.tensor: estimate_collective_s(flow, row_bytes[flow.tensor], latency_s=0.0, bytes_per_s=bytes_per_s)
            for flow in work.flows
        },
    )


def _scale(row_s: float, num_rows: int) -> float:
    return row_s * num_rows


def _row_bytes(what: Pass, work: Work, flow: Flow) -> float:
    is_gathered = flow.kind is Kind.ALL_GATHER
    return float(what.site.gathered_row_bytes(work) if is_gathered else what.site.row_bytes(Content.ADDEND))


def _count_bytes(matmul: CollectiveMatmul) -> float:
    """What a rank has to receive at least, that with most of it."""
    return sum(
        (2 if flow.kind is Kind.ALL_REDUCE else 1)
        * (flow.split.size - min(flow.split.lengths))
        * _row_bytes(what, chosen.work, flow)
        for what, chosen in matmul.chosen.items()
        for flow in chosen.work.flows
    )
