"""The tree of costs: parts add up, kinds add up, intervals hold what they are of."""

import pytest

from plait.planner.cost import Cost, Kind, build_leaf, join
from tests.support.costs import is_sum


def test_a_node_is_its_parts_times_how_often_they_happen() -> None:
    gemm = build_leaf("gemm", Kind.GEMM, 2.0, 0.1)
    wait = build_leaf("wait", Kind.COMMUNICATION, 1.0, 0.5, hidden_s=3.0)
    block = join("block", [gemm, wait], times=4)
    step = join("step", [block, build_leaf("optimizer", Kind.OPTIMIZER, 5.0, 0.0)])
    assert (block.seconds, block.hidden_s, step.seconds) == (12.0, 12.0, 17.0)
    assert step.sum_by_kind() == {Kind.GEMM: 8.0, Kind.COMMUNICATION: 4.0, Kind.OPTIMIZER: 5.0}
    assert step.exposed_s == 4.0
    assert is_sum(step)
    assert not is_sum(Cost("wrong", None, 1.0, 0.5, 2.0, parts=(step,)))


def test_intervals_hold_the_value_and_add_up_end_by_end() -> None:
    parts = [build_leaf("a", Kind.GEMM, 1.0, 0.25), build_leaf("b", Kind.ATTENTION, 2.0, 0.5)]
    whole = join("whole", parts, times=2)
    assert whole.low_s == pytest.approx(2 * (1 / 1.25 + 2 / 1.5))
    assert whole.high_s == pytest.approx(2 * (1.25 + 3.0))


def test_what_takes_no_time_is_left_out_unless_something_hides_it() -> None:
    nothing, hidden = (build_leaf("x", Kind.COMMUNICATION, 0.0, 0.1, hidden_s=hidden_s) for hidden_s in (0.0, 1.0))
    assert join("node", [nothing, hidden]).parts == (hidden,)


def test_constants_and_nodes_are_found_at_any_depth() -> None:
    leaf = build_leaf("leaf", Kind.GEMM, 1.0, 0.1, constants=("a", "b"))
    tree = join("root", [join("branch", [leaf]), build_leaf("other", Kind.GEMM, 1.0, 0.1, constants=("b", "c"))])
    assert tree.list_constants() == ("a", "b", "c")
    assert tree.find("leaf") == leaf
    with pytest.raises(KeyError):
        tree.find("twig")
