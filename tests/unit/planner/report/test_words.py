from dataclasses import replace

from plait.planner.plan_config import PlanConfig
from plait.planner.prediction import Verdict
from plait.planner.report.words import (
    describe_asked,
    describe_plan,
    describe_verdict,
    format_constant,
    list_first_worse,
)
from plait.planner.tensor_degree import TensorDegree
from tests.support.planned_report import build_report


def test_degrees_of_one_are_left_out_but_for_tp() -> None:
    assert describe_plan(PlanConfig()) == "tp 1"
    assert describe_plan(PlanConfig(tp=8, pp=4, interleave=2, dp_shard=2, dp_replicate=3)) == (
        "tp 8, pp 4, dp 6, 2 chunks a rank"
    )


def test_the_verdict_names_plan_time_memory_and_what_binds() -> None:
    report = build_report()
    verdict = describe_verdict(report)
    assert verdict.startswith("The fastest plan that fits is tp 4, pp 2, dp 2: ")
    assert "The worst rank fits: " in verdict
    assert f"What binds is {report.best.binding.term}" in verdict
    assert describe_verdict(build_report(fits=False)).startswith("No plan fits; tp 4, pp 2, dp 2 lacks least: ")


def test_what_was_asked_has_units() -> None:
    assert describe_asked(build_report("my-model")).startswith("my-model (8.03 billion parameters) on 16 x NVIDIA H100")
    assert "(262,144 tokens)" in describe_asked(build_report())


def test_each_of_the_three_questions_has_an_answer() -> None:
    answers = [said for _, said in list_first_worse(build_report())]
    assert answers[0] == "no degree that was tried is worse than the one before"
    assert answers[1].startswith("tp 16: ")
    assert " at tp 8 (" in answers[1]


def lack(degree: TensorDegree) -> TensorDegree:
    assert degree.same is not None
    memory = replace(degree.same.memory, verdict=Verdict.DOES_NOT_FIT)
    return replace(degree, same=replace(degree.same, memory=memory))


def test_a_first_worse_degree_says_which_of_the_two_does_not_fit() -> None:
    report = build_report()
    *first, eight, sixteen, other = report.degrees
    before = list_first_worse(replace(report, degrees=(*first, lack(eight), sixteen, other)))[1][1]
    assert " at tp 8, which does not fit (" in before
    after = list_first_worse(replace(report, degrees=(*first, eight, lack(sixteen), other)))[1][1]
    assert after.startswith("tp 16, which does not fit: ")
    both = list_first_worse(replace(report, degrees=(*first, lack(eight), lack(sixteen), other)))
    assert both[1][1].startswith("tp 16: ")
    assert " at tp 8, neither of which fits (" in both[1][1]
    assert "fit" not in both[2][1]  # those are plans that fit


def test_a_difference_that_the_constants_leave_open_is_said_to_be_none() -> None:
    report = build_report()
    eight = report.degrees[-3].same
    assert eight is not None
    assert report.worse_best is not None
    hardly = replace(eight.step, parts=(*eight.step.parts, replace(eight.step.find("optimizer"), seconds=1e-6)))
    unsure = replace(hardly, seconds=eight.step.seconds)
    degrees = tuple(
        replace(each, best=replace(eight, step=unsure)) if each.tp == 16 else each for each in report.degrees
    )
    said = list_first_worse(replace(report, degrees=degrees))
    assert said[2][1].endswith("; no worse than the prediction can tell")
    assert "can tell" not in said[1][1]


def test_one_degree_is_not_compared_with_another() -> None:
    report = build_report()
    alone = replace(report, degrees=report.degrees[2:3], worse_same=None, worse_best=None)
    assert {said for _, said in list_first_worse(alone)} == {"only tp 4 was tried"}


def test_constants_are_printed_in_their_units() -> None:
    assert format_constant(989e12, "FLOP/s") == "989 TFLOP/s"
    assert format_constant(0.85, "1") == "0.85"
    assert format_constant(4.7e-6, "s") == "4.7 us"
    assert format_constant(0.0, "s") == "0 s"
