"""How the prompt tokens of a step are shared among the prompts that are being read."""

from collections.abc import Sequence


def share_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each prompt are read now; `lengths` are what is unread, the oldest prompt's first.

    Half of the budget is the oldest's, so that every prompt is read in the end; the rest goes to the shortest first,
    as they wait the longest for what they need; what is left over is the oldest's again. A long prompt therefore never
    keeps a short one waiting, nor many short ones a long one.
    """
    shares = [0] * len(lengths)
    if not lengths:
        return shares
    shares[0] = min(lengths[0], max(1, budget // 2))
    left = budget - shares[0]
    for index in sorted(range(1, len(lengths)), key=lambda index: lengths[index]):
        shares[index] = min(lengths[index], max(0, left))
        left -= shares[index]
    shares[0] += min(lengths[0] - shares[0], max(0, left))
    return shares
