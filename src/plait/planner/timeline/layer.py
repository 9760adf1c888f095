"""One layer of a plan as bars, forward and then backward: one thing after another, and as its schedules overlap it.

What everything takes is read from the prediction's tree, so that the charts are as long as it says. The overlapped one
shows each pass through a linear as its program runs on the simulated clock; by how much real kernels are behind that
is a bar of its own at the end of the pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from plait.contract.op import Op
from plait.planner.cost import COMPUTE, Cost, Kind
from plait.planner.planned import derive_planned_model, is_linear
from plait.planner.prediction import Prediction
from plait.planner.step.circumstance import Circumstance
from plait.planner.timeline.passes import DrawnPass, build_drawn_pass
from plait.schedule.chart import Bar, Chart

_Segment = tuple[list[Bar], float]
"""Bars from time 0, and when what follows begins."""


@dataclass(frozen=True, slots=True)
class LayerChart:
    """The bars of a layer.

    Attributes:
        backward_s: when backward begins.
        seconds: when it ends; nothing may be drawn there, where a rank waits.
    """

    chart: Chart
    backward_s: float
    seconds: float


def build_layer_charts(prediction: Prediction, *, rank: int = 0) -> tuple[LayerChart, LayerChart]:
    """What a tp rank does in one layer, serially and as predicted; the bars are of that rank alone."""
    return (
        _lay_out("serial", _Drawing(prediction, rank, has_overlap=False)),
        _lay_out("overlapped", _Drawing(prediction, rank, has_overlap=True)),
    )


@dataclass(frozen=True, slots=True)
class _Drawing:
    prediction: Prediction
    rank: int
    has_overlap: bool

    def list_halves(self) -> Iterator[list[_Segment]]:
        """Forward, then backward of a block."""
        contract = derive_planned_model(self.prediction.model, self.prediction.plan, self.prediction.seq_len)
        where = Circumstance(self.prediction.cluster, self.prediction.plan, contract)
        linears = {op.name: op for op in contract.block if is_linear(op)}
        for part in self.prediction.step.find("blocks").parts:
            yield list(self._list_of(part, linears, where))

    def _list_of(self, cost: Cost, linears: Mapping[str, Op], where: Circumstance) -> Iterator[_Segment]:
        if (op := linears.get(cost.name)) is not None:
            yield from self._list_linear(cost, op, where)
        elif cost.parts:
            for _ in range(round(cost.times)):
                for part in cost.parts:
                    yield from self._list_of(part, linears, where)
        else:
            yield self._draw_leaf(cost)

    def _list_linear(self, cost: Cost, op: Op, where: Circumstance) -> Iterator[_Segment]:
        """What is beside each other as a pass, and what comes before and after it by itself."""
        one = build_drawn_pass(cost, op, where)
        inside = () if one is None else one.parts
        is_drawn = False
        for part in cost.parts:
            if not any(part is each for each in inside):
                yield from self._list_of(part, {}, where)
            elif one is not None and not is_drawn:
                yield self._draw_pass(one)
                is_drawn = True

    def _draw_leaf(self, leaf: Cost) -> _Segment:
        if leaf.kind in COMPUTE:
            kind = leaf.name if leaf.kind is Kind.GEMM else str(leaf.kind)
            return [Bar(self.rank, "compute", kind, leaf.name, 0.0, leaf.seconds)], leaf.seconds
        # What is hidden was on its way beneath what has just been computed.
        start_s = -leaf.hidden_s if self.has_overlap else 0.0
        seconds = leaf.seconds if self.has_overlap else leaf.seconds + leaf.hidden_s
        return [*_move(self.rank, "collective", leaf.name, start_s, seconds)], seconds

    def _draw_pass(self, one: DrawnPass) -> _Segment:
        if not self.has_overlap or not one.is_overlapped:
            return self._queue(one), one.serial_s
        timeline = one.simulate()
        bars = [
            Bar(
                event.rank,
                event.track.value,
                one.name_kind(event),
                f"{one.name}: {event.name}",
                event.start_s,
                event.end_s,
            )
            for event in timeline.events
            if event.rank == self.rank
        ]
        if one.seconds > timeline.duration_s:
            behind = f"{one.name}: kernels are behind the schedule"
            bars.append(Bar(self.rank, "compute", "wait", behind, timeline.duration_s, one.seconds))
        return bars, one.seconds

    def _queue(self, one: DrawnPass) -> list[Bar]:
        """Gathers, GEMMs, sums: each waits for what is before it."""
        bars, now_s = [], 0.0
        for kind, name, seconds in one.list_in_order():
            if kind in one.timed.gemms:
                bars.append(Bar(self.rank, "compute", kind, name, now_s, now_s + seconds))
            else:
                bars += _move(self.rank, kind, name, now_s, now_s + seconds)
            now_s += seconds
        return bars


def _move(rank: int, kind: str, name: str, start_s: float, end_s: float) -> Iterator[Bar]:
    """A collective takes both directions of the link."""
    yield Bar(rank, "send", kind, name, start_s, end_s)
    yield Bar(rank, "recv", kind, name, start_s, end_s)


def _lay_out(title: str, drawing: _Drawing) -> LayerChart:
    """Segments one after another."""
    laid, now_s, begun_s = [], 0.0, []
    for half in drawing.list_halves():
        begun_s.append(now_s)
        for bars, seconds in half:
            laid += [replace(bar, start_s=now_s + bar.start_s, end_s=now_s + bar.end_s) for bar in bars]
            now_s += seconds
    return LayerChart(Chart(title, tuple(laid)), begun_s[-1], now_s)
