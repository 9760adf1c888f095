"""What must hold of every tree of costs."""

from math import isclose

from plait.planner.cost import Cost


def is_sum(cost: Cost) -> bool:
    """Whether every node with parts is what they add up to."""
    return all(
        isclose(node.seconds, node.times * sum(part.seconds for part in node.parts), rel_tol=1e-9, abs_tol=1e-15)
        for node, _ in cost.walk()
        if node.parts
    )
