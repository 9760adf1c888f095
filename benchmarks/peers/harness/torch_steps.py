"""Turns a torch forward function into the (step, fingerprint) pair a peer returns."""

from collections.abc import Callable

import torch

from .torch_reference import sum_squares
from .workitem import WorkItem


def _squares(t: torch.Tensor, copies: int) -> float:
    if hasattr(t, "full_tensor"):  # DTensor: every rank sees the whole
        t, copies = t.full_tensor(), torch.distributed.get_world_size()
    return sum_squares(t) / copies


def make_step(
    item: WorkItem,
    forward: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    weights: dict[str, torch.Tensor],
    *,
    dy: torch.Tensor | None = None,
    copies: dict[str, int] | None = None,
    after_backward: Callable[[], None] | None = None,
):
    """
    ``forward(*inputs)`` returns the block's output (then ``dy`` is its gradient) or the loss.
    ``weights`` maps canonical names to leaf tensors; for a block, ``inputs[0]`` is the leaf x.
    ``copies`` says on how many ranks the same value stands ("loss", "x" and weight names;
    default 1), since the harness sums fingerprints over the ranks.
    """
    copies = copies or {}
    leaves = [t for t in (*inputs, *weights.values()) if t.requires_grad]
    last: dict[str, torch.Tensor] = {}

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        out = forward(*inputs)
        out.backward(dy)
        if after_backward:
            after_backward()
        last["out"] = out.detach()

    def fingerprint() -> dict[str, float]:
        out = last["out"]
        if dy is not None:
            if hasattr(out, "full_tensor"):
                loss = float((out.full_tensor().double() * dy.full_tensor().double()).sum())
                loss /= torch.distributed.get_world_size()
            else:
                loss = float((out.double() * dy.double()).sum()) / copies.get("loss", 1)
        else:
            held = copies.get("loss", 1)
            if hasattr(out, "full_tensor"):
                out, held = out.full_tensor(), torch.distributed.get_world_size()
            loss = float(out) / held
        result = {"loss": loss}
        if item.kind == "block" and inputs[0].requires_grad:
            result["x"] = _squares(inputs[0].grad, copies.get("x", 1))
        for name, w in weights.items():
            result[name] = _squares(w.grad, copies.get(name, 1))
        return result

    return step, fingerprint
