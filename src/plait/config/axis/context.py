"""How attention sees a whole sequence that is cut over context-parallel ranks."""

from typing import Literal

from plait.config.section import Section

ContextMethodName = Literal["ring", "all_gather", "all_to_all"]
OrderName = Literal["zigzag", "contiguous"]


class ContextConfig(Section):
    """What brings queries and keys of different ranks together, and which tokens a rank has; for `parallel.cp` > 1."""

    method: ContextMethodName = "ring"
    """Keys and values pass from rank to rank, are all gathered, or tokens are exchanged for heads (Ulysses)."""
    order: OrderName = "zigzag"
    """An early and a late part of each sequence on every rank, which is equal work, or one part after the other."""
