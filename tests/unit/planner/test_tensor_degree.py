"""How far tensor parallelism pays, asked three ways."""

from dataclasses import replace

from plait.planner.cost import Kind, build_leaf, join
from plait.planner.plan_config import PlanConfig
from plait.planner.tensor_degree import compare_terms, exchange_dp, find_worse


def build(compute_s: float, communication_s: float) -> object:
    return join(
        "step",
        [
            build_leaf("gemm", Kind.GEMM, compute_s, 0.1),
            build_leaf("moves", Kind.COMMUNICATION, communication_s, 0.1),
        ],
    )


def test_the_first_degree_that_takes_longer_in_all_is_found_with_what_grew_most() -> None:
    costs = [(1, build(8.0, 0.0)), (2, build(4.0, 1.0)), (4, build(2.0, 3.5)), (8, build(1.0, 9.0))]
    worse = find_worse(costs)  # type: ignore[arg-type]
    assert worse is not None
    assert (worse.tp, worse.before, worse.seconds, worse.before_s) == (4, 2, 5.5, 5.0)
    assert (worse.term, worse.term_s) == ("communication", 2.5)
    assert worse.factor == 1.1


def test_communication_alone_does_not_make_a_degree_worse() -> None:
    assert find_worse([(1, build(8.0, 0.0)), (2, build(4.0, 3.9))]) is None  # type: ignore[list-item]


def test_terms_are_compared_by_kind() -> None:
    terms = compare_terms(build(1.0, 2.0), build(3.0, 0.5))  # type: ignore[arg-type]
    assert terms == {"gemm": -2.0, "communication": 1.5}


def test_dp_makes_up_for_tp() -> None:
    plan = PlanConfig(tp=2, pp=2, dp_shard=4, dp_replicate=2)
    assert exchange_dp(plan, 4, 32) == replace(plan, tp=4, dp_replicate=2, dp_shard=2)
    assert exchange_dp(replace(plan, sharded="nothing", dp_shard=1, dp_replicate=8), 1, 32).dp_replicate == 16
