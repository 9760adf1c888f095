"""Backward functions that are not differentiable themselves."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's, which also enters `no_grad` where gradients are off: of a small block's step that took a fiftieth."""
    refusing = function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return refusing(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
