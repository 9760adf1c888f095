"""What backward takes a second time so that forward need not keep it, and what is then left to keep.

full         a block keeps its input (Chen et al., arXiv:1604.06174). All of it is taken again before its backward but
             the last linear, whose sum is the input of the next block: that is kept there, so nothing is sent for it
selective    the core of attention keeps what it reads (Korthikanti et al., arXiv:2205.05198), and is taken again before
             its own backward
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.contract.op import Op
from plait.contract.step import Move, Step

if TYPE_CHECKING:  # a linear is explained without pydantic, whose import takes longer
    from plait.config.train import Recompute


def apply_recompute(block: Sequence[Op], recompute: "Recompute") -> tuple[Op, ...]:
    """The operations of a block, which keep less and take steps again."""
    if recompute == "full":
        last = max(index for index, op in enumerate(block) if op.parameters)
        again = [op.forward if index != last else _list_before_sum(op) for index, op in enumerate(block)]
        saved = [block[0].saved, *[()] * (len(block) - 1)]
        return tuple(replace(op, saved=kept, again=steps) for op, kept, steps in zip(block, saved, again, strict=True))
    if recompute == "selective":
        return tuple(_keep_inputs(op) if op.is_attention else op for op in block)
    return tuple(block)


def list_backward(block: Sequence[Op], recompute: "Recompute") -> Iterator[Step]:
    """The steps of a block's backward in order: the operations of forward in reverse, each behind what it needs."""
    if recompute == "full":
        yield from (step for op in block for step in op.again)
    for op in reversed(block):
        if recompute == "selective":
            yield from op.again
        yield from op.backward


def _list_before_sum(op: Op) -> tuple[Step, ...]:
    """What the last linear does to keep its input: where that is quantized, magnitudes are agreed on."""
    first = next(index for index, step in enumerate(op.forward) if not _is_small(step))
    return op.forward[:first]


def _is_small(step: Step) -> bool:
    return isinstance(step, Move) and step.collective.op == "max"


def _keep_inputs(op: Op) -> Op:
    names = {tensor.name for tensor in op.inputs}
    return replace(op, saved=tuple(saved for saved in op.saved if saved.name in names), again=op.forward)
