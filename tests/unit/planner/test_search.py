"""The search is exact: of the plans that it leaves out none is faster than what it keeps."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.config.overlap import OverlapConfig
from plait.config.presets import load_preset
from plait.planner.cluster import Cluster
from plait.planner.hardware import load_hardware
from plait.planner.plan_config import PlanConfig
from plait.planner.predict import predict
from plait.planner.prediction import Prediction, Verdict
from plait.planner.search import search
from plait.planner.space.candidates import list_candidates, list_methods, list_shardings
from plait.planner.space.degrees import Degrees, Task, list_degrees

H100 = load_hardware("h100")
TASK = Task(load_preset("llama3-8b"), Cluster(H100, 8), 4096, 16)


def predict_plan(task: Task, plan: PlanConfig) -> Prediction:
    return predict(task.model, task.cluster, plan, seq_len=task.seq_len, global_batch=task.global_batch)


def find_fastest(task: Task, fixed: dict[str, Any]) -> dict[Degrees, float]:
    """By predicting every plan there is."""
    fastest: dict[Degrees, float] = {}
    policies = (
        [fixed] if "overlap" in fixed else [fixed | {"overlap": OverlapConfig(policy=p)} for p in ("auto", "disabled")]
    )
    for degrees in list_degrees(task, fixed)[0]:
        for asked in policies:
            for candidate in list_candidates(degrees, task, asked):
                ways = list_methods(candidate.build_plan(asked), task, asked)
                for plan in (each for way in ways for each in list_shardings(way, task, asked)):
                    prediction = predict(
                        task.model, task.cluster, plan, seq_len=task.seq_len, global_batch=task.global_batch
                    )
                    if prediction.memory.verdict is not Verdict.DOES_NOT_FIT:
                        fastest[degrees] = min(prediction.step_s, fastest.get(degrees, prediction.step_s))
    return fastest


def check(task: Task, fixed: dict[str, Any], limit: int = 100) -> None:
    """What is found is the fastest of its degrees; what is not is slower than `limit` others and not best of a tp."""
    space, fastest = search(task, fixed, limit=limit), find_fastest(task, fixed)
    found = {each.degrees: each.seconds for each in space.found}
    times = sorted(fastest.values())
    for degrees, seconds in fastest.items():
        is_best_of_tp = seconds == min(s for d, s in fastest.items() if d.tp == degrees.tp)
        if seconds in times[:limit] or is_best_of_tp:
            assert found[degrees] == pytest.approx(seconds, rel=1e-9), degrees
    assert set(found) <= set(fastest)


@pytest.mark.parametrize("fixed", [{"tp": 2}, {"pp": 2, "recompute": "full"}, {"cp": 2, "micro_batch": 2}])
def test_it_finds_what_trying_everything_finds(fixed: dict[str, Any]) -> None:
    check(TASK, fixed)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seq_len=st.sampled_from([2048, 8192]), global_batch=st.sampled_from([8, 12]),
    recompute=st.sampled_from(["none", "selective", "full"]), limit=st.sampled_from([1, 3]),
)  # fmt: skip
def test_a_limit_keeps_the_fastest_and_the_fastest_of_each_tp(
    seq_len: int, global_batch: int, recompute: str, limit: int
) -> None:
    task = Task(TASK.model, Cluster(H100, 4), seq_len, global_batch)
    check(task, {"recompute": recompute, "sequence_parallel": True}, limit)


def test_it_is_deterministic() -> None:
    assert search(TASK, {}, limit=5) == search(TASK, {}, limit=5)


def test_equal_times_are_in_the_order_of_degrees() -> None:
    found = search(TASK, {}, limit=100).found
    assert found == tuple(sorted(found, key=lambda each: (each.seconds, each.degrees)))


def test_where_nothing_fits_the_plan_that_lacks_least_is_found() -> None:
    space = search(Task(load_preset("llama3-405b"), Cluster(H100, 8), 4096, 16), {}, limit=5)
    assert space.found == ()
    assert space.nearest is not None
    degrees = Degrees(space.nearest.tp, space.nearest.cp, space.nearest.pp, space.nearest.dp)
    lacking = [each.lacking_bytes for each in space.refused if each.lacking_bytes]
    assert lacking
    assert min(lacking) == next(each.lacking_bytes for each in space.refused if each.degrees == degrees)
