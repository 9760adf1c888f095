"""A plan's report: ranked, with what is refused, and the first tensor degree that is worse."""

from itertools import pairwise

import pytest

from plait.config.presets import load_preset
from plait.errors import ConfigError
from plait.planner import Cluster, PlanReport, Verdict, load_hardware, plan, predict

H100 = load_hardware("h100")


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return plan(load_preset("llama3-8b"), Cluster(H100, 16), seq_len=4096, global_batch=64, name="llama3-8b")


def test_plans_are_ranked_by_time_and_all_have_room(report: PlanReport) -> None:
    times = [each.step_s for each in report.ranked]
    assert times == sorted(times)
    assert len(report.ranked) == 10
    assert all(each.memory.verdict is not Verdict.DOES_NOT_FIT for each in report.ranked)
    assert report.best is report.ranked[0]
    assert report.nearest is None


def test_a_ranked_plan_is_what_predict_says_of_it(report: PlanReport) -> None:
    for each in report.ranked:
        assert predict(report.model, report.cluster, each.plan, seq_len=4096, global_batch=64).step_s == each.step_s


def test_the_first_worse_degree_is_of_the_complete_time(report: PlanReport) -> None:
    best = {each.tp: each.best for each in report.degrees if each.best}
    worse = report.worse_best
    assert worse is not None
    assert best[worse.tp].step_s > best[worse.before].step_s
    before = [tp for tp in best if tp <= worse.before]
    assert all(best[tp].step_s >= best[after].step_s for tp, after in pairwise(before))
    same = {each.tp: each.same for each in report.degrees}
    assert same[report.best.plan.tp] == report.best


def test_a_layer_on_more_devices_has_the_same_micro_batch(report: PlanReport) -> None:
    layers = {each.tp: each.layer for each in report.degrees}
    assert report.best.step.find("blocks").seconds / report.best.step.find("blocks").times == pytest.approx(
        layers[report.best.plan.tp].seconds  # type: ignore[union-attr]
    )


def test_more_of_it_fixed_is_never_faster(report: PlanReport) -> None:
    fixed = plan(report.model, report.cluster, seq_len=4096, global_batch=64, fixed={"tp": 4, "recompute": "full"})
    assert fixed.best.plan.tp == 4
    assert fixed.best.plan.recompute == "full"
    assert fixed.best.step_s > report.best.step_s
    assert fixed.fixed == ("tp = 4", "recompute = full")


def test_equal_arguments_give_equal_reports(report: PlanReport) -> None:
    again = plan(load_preset("llama3-8b"), Cluster(H100, 16), seq_len=4096, global_batch=64, name="llama3-8b")
    assert again == report


def test_where_nothing_fits_the_nearest_is_said() -> None:
    report = plan(load_preset("llama3-405b"), Cluster(H100, 8), seq_len=4096, global_batch=8)
    assert report.ranked == ()
    assert report.best.memory.verdict is Verdict.DOES_NOT_FIT
    assert report.best is report.nearest
    assert all(each.best is None and "no plan fits" in each.reason for each in report.degrees)


def test_rotary_positions_reach_farther_than_the_model_says() -> None:
    report = plan(load_preset("llama3-8b"), Cluster(H100, 8), seq_len=32_768, global_batch=8)
    assert report.model.max_seq_len == 32_768


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"global_batch": 0}, "global_batch = 0: should be at least 1"),
        ({"global_batch": 10**20}, f"global_batch = {10**20}: should be at most 10000000"),
        ({"seq_len": 10**12}, f"seq_len = {10**12}: should be at most 1000000000"),
        ({"fixed": {"tp": 3}}, "tp = 3 does not divide 16 devices"),
        ({"fixed": {"tp": 8, "pp": 4}}, "tp 8 * pp 4 = 32 devices, but there are 16"),
        ({"fixed": {"tp": 2, "cp": 1, "pp": 1, "dp": 4}}, "tp 2 * cp 1 * pp 1 * dp 4 = 8 devices, but there are 16"),
        ({"global_batch": 6, "fixed": {"dp": 4}}, "a global batch of 6 cannot be divided by dp = 4"),
        ({"fixed": {"micro_batch": 7}}, "there is no plan"),
        ({"global_batch": 3, "fixed": {"tp": 1, "pp": 1, "cp": 1}}, "leaves dp = 16"),
    ],
)
def test_what_cannot_be_is_one_error(arguments: dict[str, object], text: str) -> None:
    asked = {"seq_len": 4096, "global_batch": 64, **arguments}
    with pytest.raises(ConfigError) as caught:
        plan(load_preset("llama3-8b"), Cluster(H100, 16), **asked)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_learned_positions_end() -> None:
    with pytest.raises(ConfigError, match="learned positions for 1024 tokens"):
        plan(load_preset("gpt2"), Cluster(H100, 8), seq_len=2048, global_batch=8)
