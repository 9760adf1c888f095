"""Which half of backward is under way: schedules without a bubble compute gradients of inputs first, of weights later.

Of a C++ node autograd asks only what is wanted of it. A Python function is called for all of it both times, and would
multiply and send everything twice; so it asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from plait.parallel.region.quantizer import Needs


class Half(Enum):
    """What a pass through backward computes."""

    BOTH = "both"
    INPUTS = "inputs"
    WEIGHTS = "weights"


class _Current:
    """Of the process: autograd computes on threads of its own."""

    half = Half.BOTH


@contextmanager
def compute_half(half: Half) -> Iterator[None]:
    """Let functions compute only this inside the block; they are called again for the other half."""
    before, _Current.half = _Current.half, half
    try:
        yield
    finally:
        _Current.half = before


def is_split() -> bool:
    """Whether what is not computed now will be later, or was."""
    return _Current.half is not Half.BOTH


def select_half(needs: Needs) -> Needs:
    """Those of the half that is under way."""
    match _Current.half:
        case Half.INPUTS:
            return needs._replace(weights=(False,) * len(needs.weights), biases=(False,) * len(needs.biases))
        case Half.WEIGHTS:
            return needs._replace(x=False)
        case Half.BOTH:
            return needs
