"""What a rank keeps for backward, read off the tensors that autograd saves, is what the contract says."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from plait.contract.context.attention import AttentionSize, build_plan
from plait.contract.context.mask import AttentionMask
from plait.contract.block.saved import derive_context_saved
from plait.parallel.context.attention import attend
from plait.parallel.context.tokens import take_own
from tests.support.context_attention import HEAD_WIDTH, SIZE, Case, build_axis, list_contexts


def measure(dtype: torch.dtype) -> list[tuple[str, int, int]]:
    """Bytes that autograd holds between forward and backward, each once, and those promised."""
    axis, measured = build_axis(2), []
    case = Case(AttentionMask(), dtype=dtype)
    size = AttentionSize(case.batch, 4, 2, HEAD_WIDTH, str(dtype).removeprefix("torch."), "float32")
    for context in list_contexts(axis, SIZE):
        held: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor, held: dict[int, torch.Tensor] = held) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        own = [take_own(x, context.order, axis.rank, dim=2).requires_grad_() for x in case.draw()[:3]]
        with saved_tensors_hooks(note, lambda tensor: tensor):
            y = attend(*own, context, case.mask)
        saved = derive_context_saved(build_plan(context.order, case.mask, case.batch), size, context.method, axis.rank)
        found = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
        measured.append((context.method, found, sum(tensor.num_bytes for tensor in saved)))
        y.sum().backward()
    return measured


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_autograd_keeps_what_the_contract_says(ranks, dtype):
    for measured in ranks(2).call(measure, dtype=dtype):
        assert [found for _, found, _ in measured] == [promised for _, _, promised in measured]
