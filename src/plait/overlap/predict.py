"""How long one way to run a collective GEMM takes: its programs on a simulated clock, at the rates of this machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from plait.overlap.choice import LIBRARY, Way
from plait.overlap.machine.rates import Rates
from plait.overlap.site import Site
from plait.schedule.costs import Costs, estimate_collective_s
from plait.schedule.pair import Half, build_pair, join_costs, join_pair
from plait.schedule.program import build_program
from plait.schedule.simulate import simulate
from plait.schedule.step import Content
from plait.schedule.work import Work
from plait.sharding import Kind

_BEGINNING = ("ring",)
"""The transports over which one pass begins what the next gathers."""


@dataclass(frozen=True)
class Prediction:
    """What a collective GEMM takes.

    Attributes:
        exposed_s: how much of it the rank waits that waits longest.
    """

    duration_s: float
    exposed_s: float


@dataclass(frozen=True)
class Before:
    """The pass before, which may begin what another gathers."""

    way: Way
    work: Work
    site: Site

    def begins(self, way: Way, work: Work) -> bool:
        """Whether it begins the gather of `work`, run as `way`."""
        if self.way.transport != way.transport or way.transport not in _BEGINNING:
            return False
        return Half(self.work, self.way.method, self.way.chunks).can_begin(Half(work, way.method, way.chunks))


def predict(way: Way, work: Work, site: Site, rates: Rates, before: Before | None = None) -> Prediction:
    """Predict `work` at `site`, run as `way`; equal arguments give equal predictions.

    Behind a pass that begins its gather it is what both take together, less what that one takes alone.
    """
    site = replace(site, label="")
    if before is None or not before.begins(way, work):
        return _predict(way, work, site, rates)
    before = replace(before, site=replace(before.site, label=""))
    alone, both = _predict(before.way, before.work, before.site, rates), _predict_pair(before, way, work, site, rates)
    return Prediction(both.duration_s - alone.duration_s, max(0.0, both.exposed_s - alone.exposed_s))


@lru_cache(maxsize=1024)
def _predict_pair(before: Before, way: Way, work: Work, site: Site, rates: Rates) -> Prediction:
    halves = Half(before.work, before.way.method, before.way.chunks), Half(work, way.method, way.chunks)
    programs = [join_pair(*build_pair(*halves, rank)) for rank in range(work.flows[0].split.degree)]
    costs = derive_costs(before.way.transport, before.work, before.site, rates)
    timeline = simulate(programs, join_costs(costs, derive_costs(way.transport, work, site, rates)))
    return Prediction(timeline.duration_s, timeline.exposed_s)


@lru_cache(maxsize=4096)
def _predict(way: Way, work: Work, site: Site, rates: Rates) -> Prediction:
    degree = work.flows[0].split.degree
    programs = [build_program(work, way.method, way.chunks, rank) for rank in range(degree)]
    timeline = simulate(programs, derive_costs(way.transport, work, site, rates))
    return Prediction(timeline.duration_s, timeline.exposed_s)


def derive_costs(transport: str, work: Work, site: Site, rates: Rates) -> Costs:
    """What the steps of `work` at `site` take over `transport`."""
    gemm_s = {gemm: _time_gemm(site, rates, packs=gemm == work.rowwise) for gemm in work.gemms}
    row_bytes = {
        flow.tensor: float(
            site.gathered_row_bytes(work) if flow.kind is Kind.ALL_GATHER else site.row_bytes(Content.ADDEND)
        )
        for flow in work.flows
    }
    if transport == LIBRARY:
        collect_s = {
            flow.tensor: rates.library.seconds(flow.kind, work.num_rows * row_bytes[flow.tensor]) for flow in work.flows
        }
        return Costs(gemm_s, row_bytes, collect_s=collect_s)
    link = rates.link(transport)
    sum_row_bytes = site.row_bytes(Content.ADDEND)
    add_row_s = sum_row_bytes / link.add_bytes_per_s
    collect_s = {
        flow.tensor: estimate_collective_s(
            flow, row_bytes[flow.tensor], latency_s=link.latency_s, bytes_per_s=link.bytes_per_s
        )
        + (0.0 if flow.kind is Kind.ALL_GATHER else (flow.split.degree - 1) * flow.split.longest * add_row_s)
        for flow in work.flows
    }
    return Costs(
        gemm_s, row_bytes,
        latency_s=link.latency_s, bytes_per_s=link.bytes_per_s, add_s=link.add_s, add_row_s=add_row_s,
        step_s=link.step_s, collect_s=collect_s, contention=link.contention,
    )  # fmt: skip


def _time_gemm(site: Site, rates: Rates, *, packs: bool) -> Callable[[int], float]:
    """How long rows of a GEMM take; one that sums over rows packs no weight, so a piece of it costs no more."""
    row_s = site.flops_per_row / rates.gemm.flops_per_s
    return partial(_seconds, rates.gemm.call_s + packs * rates.gemm.extra_rows * row_s, row_s)


def _seconds(call_s: float, row_s: float, num_rows: int) -> float:
    return call_s + num_rows * row_s
