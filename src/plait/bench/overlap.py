"""A workload overlapped, beside the same exposed, in interleaved rounds on the same ranks."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from plait.bench.bars import RankView, Seen, build_measured_chart, build_simulated_chart
from plait.bench.limit import Limit, Movement, derive_limit
from plait.bench.recorder import Recorder, Replace
from plait.bench.rounds import Spread, find_most, find_ratio, meet, time_rounds, warm_up
from plait.bench.variant import COMPUTE, LIBRARY, POINT_TO_POINT, Step, Variant
from plait.bench.watched_link import WatchedLink
from plait.bench.workload import Workload
from plait.comm import trace
from plait.comm.agree import share_over
from plait.comm.mesh import Axis
from plait.overlap.receipt import Receipt, check_comparable
from plait.overlap.transport.ring import RingTransport
from plait.schedule.chart import Chart

COMMUNICATION = "communication only"


@dataclass(frozen=True)
class Run:
    """One variant as measured.

    Attributes:
        times_s: by round, of the slowest rank.
        exposed_s: in a step, how long the rank that waited longest waited in its collective GEMMs.
        predicted_exposed_s: the same by the cost model; None where it was not asked.
    """

    variant: Variant
    times_s: tuple[float, ...]
    exposed_s: float
    predicted_exposed_s: float | None
    receipt: Receipt

    @property
    def median_s(self) -> float:
        """Of all rounds."""
        return Spread.of(self.times_s).median


@dataclass(frozen=True)
class Comparison:
    """What was measured, the same on every rank but for the receipts.

    Attributes:
        exposed: the variants without overlap.
        overlapped: those that were asked for.
        compute_s: by round, the local work with nothing moved.
        limits: of each that was asked for.
        charts: one step of the best without overlap, of the best with it, and that simulated; if wanted.
    """

    workload: Workload
    exposed: tuple[Run, ...]
    overlapped: tuple[Run, ...]
    compute_s: tuple[float, ...]
    limits: tuple[Limit, ...]
    charts: tuple[Chart, ...] = ()

    @property
    def best_exposed(self) -> Run:
        """The fastest without overlap: anything else would be an easy opponent."""
        return min(self.exposed, key=lambda run: run.median_s)

    @property
    def best_overlapped(self) -> Run:
        """The fastest of those that were asked for."""
        return min(self.overlapped, key=lambda run: run.median_s)

    def find_gain(self, run: Run, over: Run | None = None) -> Spread:
        """How many times as long another run takes, the best exposed one unless it is named."""
        return find_ratio((over or self.best_exposed).times_s, run.times_s)

    def find_excess(self, run: Run) -> Spread:
        """How many times as long it takes as the same local work with nothing moved."""
        return find_ratio(run.times_s, self.compute_s)

    def find_fraction(self, run: Run) -> Spread:
        """Which part of what its schedule could reach a run reaches."""
        limit_s = self.limits[self.overlapped.index(run)].schedule_s
        return find_ratio([limit_s] * len(run.times_s), run.times_s)


def compare(
    workload: Workload,
    asked: Sequence[Variant],
    tp: int,
    *,
    rounds: int,
    draws: bool = False,
    replace: Replace | None = None,
) -> Comparison:
    """Measure on every rank of the world; `replace` puts other GEMMs into every variant.

    Raises:
        ConfigError: a variant that was asked for runs the same as one without overlap.
    """
    torch.set_flush_denormal(True)  # with nothing moved, GEMMs read whatever is in memory
    try:
        return _compare(workload, asked, tp, rounds, draws, replace)
    finally:
        torch.set_flush_denormal(False)


def _compare(
    workload: Workload, asked: Sequence[Variant], tp: int, rounds: int, draws: bool, replace: Replace | None
) -> Comparison:
    exposed = [Step(workload, variant, tp) for variant in (LIBRARY, POINT_TO_POINT)]
    overlapped = [Step(workload, variant, tp) for variant in asked]
    steps = [*exposed, *overlapped, Step(workload, COMPUTE, tp)]
    axis = exposed[0].mesh.tp
    for step in steps:
        step.matmul.instrument = None if replace is None else Recorder(replace)
    steps[-1].matmul.instrument = recorder = Recorder(replace)
    named: dict[str, Callable[[], None]] = {str(number): step for number, step in enumerate(steps)}
    warm_up(named, axis)
    for step in overlapped:
        for other in exposed:
            check_comparable(other.receipt, step.receipt)
    movements: dict[str, Callable[[], None]] = {_name_transports(step): Movement(step.matmul) for step in overlapped}
    warm_up(movements, axis)
    recorder.gemm_s.clear()
    before_s = [_sum_exposed(step.receipt) for step in steps]
    times_s = time_rounds({**named, **movements}, rounds, axis)
    done = [_build_run(step, times_s[str(number)], before_s[number], axis) for number, step in enumerate(steps[:-1])]
    compute_s = times_s[str(len(done))]
    limits = [
        derive_limit(step.matmul, recorder.gemm_s, compute_s, times_s[_name_transports(step)]) for step in overlapped
    ]
    comparison = Comparison(
        workload, tuple(done[:2]), tuple(done[2:]), tuple(compute_s), tuple(limit for limit, _ in limits)
    )
    if not draws:
        return comparison
    best = comparison.best_overlapped
    charts = [_draw(workload, run.variant, tp, replace, axis) for run in (comparison.best_exposed, best)]
    timelines = limits[comparison.overlapped.index(best)][1]
    charts.append(build_simulated_chart(f"{best.variant.name}, simulated", timelines))
    return dataclasses.replace(comparison, charts=tuple(charts))


def _name_transports(step: Step) -> str:
    """What its passes move over: steps alike in that have the same communication to hide."""
    return f"{COMMUNICATION} over {' '.join(line.choice.transport for line in step.receipt.lines)}"


def _build_run(step: Step, times_s: Sequence[float], before_s: float, axis: Axis) -> Run:
    exposed_s = find_most((_sum_exposed(step.receipt) - before_s) / len(times_s), axis)
    predicted = [line.choice.predicted_exposed_s for line in step.receipt.lines if line.choice.overlaps]
    predicted_s = sum(each for each in predicted if each is not None) if predicted and None not in predicted else None
    return Run(step.variant, tuple(times_s), exposed_s, predicted_s, step.receipt)


def _sum_exposed(receipt: Receipt) -> float:
    return sum(line.measured_exposed_s for line in receipt.lines)


def _draw(workload: Workload, variant: Variant, tp: int, replace: Replace | None, axis: Axis) -> Chart:
    """One step, looked at from all ranks."""
    step = Step(workload, variant, tp)
    links: list[WatchedLink] = []

    def build_link(axis: Axis) -> WatchedLink:
        links.append(WatchedLink(axis))
        return links[-1]

    step.matmul.transports["ring"] = RingTransport(step.mesh.tp, build_link)
    warm_up({variant.name: step}, axis)
    recorder = Recorder(replace)
    step.matmul.instrument = recorder
    num_before = [len(link.transfers) for link in links]
    meet(axis)
    recorder.begin()
    step()
    recorder.end()
    seen = [Seen.of(each) for link, num in zip(links, num_before, strict=True) for each in link.transfers[num:]]
    with trace.aside():
        views = share_over(RankView(tuple(recorder.taken), tuple(seen)), axis, torch.device("cpu"))
    recipe = "" if workload.recipe_name == "none" else f" under {workload.recipe_name}"
    return build_measured_chart(f"{variant.name}{recipe}", views)
