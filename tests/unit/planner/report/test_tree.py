import re

from plait.planner.report.tree import build_tree
from tests.support.planned_report import build_report


def test_shares_of_the_outermost_parts_add_up() -> None:
    best = build_report().best
    tree = build_tree(best)
    assert tree.startswith('<div class="tree"><details open><summary><b>step</b>')
    assert "100.0%" in tree
    for part in best.step.parts:
        assert f"<b>{part.name}</b>" in tree


def test_a_part_that_happens_often_has_the_share_of_all_its_times() -> None:
    best = build_report().best
    blocks = best.step.find("blocks")
    times = best.step.find("micro-batches").times
    said = re.search(r"<b>blocks</b> \S+ \S+ <span>([\d.]+)%</span>", build_tree(best))
    assert said is not None
    assert abs(float(said.group(1)) / 100 - times * blocks.seconds / best.step_s) < 1e-3
