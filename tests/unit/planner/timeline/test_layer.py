from dataclasses import replace
from itertools import pairwise

import pytest

from plait.config.overlap import OverlapConfig
from plait.planner.cost import COMPUTE
from plait.planner.plan_config import PlanConfig
from plait.planner.prediction import Prediction
from plait.planner.timeline import LayerChart, build_layer_charts
from plait.schedule.chart import Bar
from tests.support.planned_report import predict_one

PLANS = [
    PlanConfig(),
    PlanConfig(tp=2),
    PlanConfig(tp=4),
    PlanConfig(tp=3),
    PlanConfig(tp=16),
    PlanConfig(tp=4, sequence_parallel=False),
    PlanConfig(tp=4, cp=2),
    PlanConfig(tp=4, recompute="full"),
    PlanConfig(tp=4, recompute="selective"),
    PlanConfig(tp=8, quantization="fp8_delayedscaling"),
    PlanConfig(tp=4, overlap=OverlapConfig(policy="mlp_only")),
]


def _list_lane(layer: LayerChart, track: str) -> list[Bar]:
    return sorted((bar for bar in layer.chart.bars if bar.track == track), key=lambda bar: bar.start_s)


def _find_block(prediction: Prediction) -> tuple[float, float]:
    forward, backward = prediction.step.find("blocks").parts
    return forward.seconds, backward.seconds


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_overlapped_chart_is_as_long_as_the_prediction(plan: PlanConfig) -> None:
    prediction = predict_one(plan)
    serial, overlapped = build_layer_charts(prediction)
    forward_s, backward_s = _find_block(prediction)
    assert overlapped.backward_s == pytest.approx(forward_s)
    assert overlapped.seconds == pytest.approx(forward_s + backward_s)
    hidden_s = sum(part.hidden_s for part in prediction.step.find("blocks").parts)
    assert serial.seconds == pytest.approx(overlapped.seconds + hidden_s)
    assert overlapped.chart.duration_s <= overlapped.seconds * (1 + 1e-9)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_rank_does_one_thing_at_a_time_on_each_lane(plan: PlanConfig) -> None:
    for layer in build_layer_charts(predict_one(plan)):
        for track in ("compute", "send", "recv"):
            lane = _list_lane(layer, track)
            for before, after in pairwise(lane):
                assert after.start_s >= before.end_s * (1 - 1e-9), (layer.chart.title, before, after)


def test_pieces_take_as_long_as_the_law_says_and_no_shorter_than_the_whole() -> None:
    prediction = predict_one(PlanConfig(tp=4))
    totals = [
        sum(bar.end_s - bar.start_s for bar in _list_lane(layer, "compute") if bar.kind not in ("wait", "add"))
        for layer in build_layer_charts(prediction)
    ]
    by_kind = prediction.step.find("blocks").sum_by_kind()
    compute_s = sum(by_kind[kind] for kind in COMPUTE) / prediction.model.num_layers
    assert totals[0] == pytest.approx(compute_s)
    # Smaller GEMMs are less efficient, which the schedule was chosen with.
    assert 1.001 * compute_s < totals[1] < 1.05 * compute_s


def test_serially_nothing_is_beside_anything() -> None:
    serial, overlapped = build_layer_charts(predict_one(PlanConfig(tp=4)))
    for layer, is_beside in ((serial, False), (overlapped, True)):
        beside = [
            (bar, other)
            for bar in _list_lane(layer, "compute")
            for other in _list_lane(layer, "recv")
            if bar.kind != "wait" and min(bar.end_s, other.end_s) - max(bar.start_s, other.start_s) > 1e-9
        ]
        assert bool(beside) == is_beside


def test_without_overlap_both_are_alike() -> None:
    plan = PlanConfig(tp=4, overlap=OverlapConfig(policy="disabled"))
    serial, overlapped = build_layer_charts(predict_one(plan))
    assert serial.chart.bars == overlapped.chart.bars
    assert replace(overlapped, chart=serial.chart) == serial


def test_bars_say_which_linear_they_are_of() -> None:
    _, overlapped = build_layer_charts(predict_one(PlanConfig(tp=4)))
    names = {bar.name.partition(": ")[0] for bar in overlapped.chart.bars if bar.kind in ("forward", "dgrad", "wgrad")}
    assert names == {"attention.wq|wk|wv", "attention.wo", "mlp.w_gate|w_up", "mlp.w_down"}


def test_another_rank_has_bars_of_its_own() -> None:
    charts = build_layer_charts(predict_one(PlanConfig(tp=4)), rank=2)
    assert {bar.rank for layer in charts for bar in layer.chart.bars} == {2}
