"""Half types are no worse for being cut, and where nothing is rounded otherwise the bits are the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plait.contract.context.mask import AttentionMask, build_documents
from plait.parallel.context.attention import attend
from plait.parallel.context.context import build_context
from plait.parallel.context.tokens import take_own
from tests.support.context_attention import Case, build_axis, list_contexts

FACTOR = 2.0
"""A tile's output is rounded as that of one device is, and their weighted mean is rounded once more."""


def measure(degree: int, dtype: torch.dtype) -> list[tuple[str, list[float], list[float]]]:
    """Root mean square errors against float64 of the output and the gradients, cut and on one device."""
    axis = build_axis(degree)
    measured = []
    for mask in (AttentionMask(), AttentionMask(window=20), AttentionMask(documents=build_documents([[40, 57], [97]]))):
        case = Case(mask, size=97, dtype=dtype)
        exact = replace(case, dtype=dtype).run_alone(torch.float64)
        alone = case.run_alone()
        for context in list_contexts(axis, case.size):
            sharded = case.run_sharded(context)
            measured.append((f"{context.method}, {mask}", find_errors(sharded, exact), find_errors(alone, exact)))
    return measured


def find_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_exact_as_on_one_device(ranks, dtype):
    for where, sharded, alone in ranks(4).call(measure, degree=4, dtype=dtype)[0]:
        assert all(a <= FACTOR * b for a, b in zip(sharded, alone, strict=True)), (where, sharded, alone)


def compare_bits() -> None:
    axis = build_axis(2)
    alone = build_context(replace(axis, degree=1, rank=0, ranks=(0,), group=None), 23, method="all_to_all")
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(AttentionMask(window=9), 4, 4, dtype=dtype)
        expected = case.run_sharded(alone)
        for order in ("contiguous", "zigzag"):
            found = case.run_sharded(build_context(axis, 23, method="all_to_all", order=order))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_heads_that_were_dealt_out_have_the_bits_of_one_device(ranks):
    ranks(2).call(compare_bits)


def repeat() -> None:
    axis = build_axis(3)
    case = Case(AttentionMask(), dtype=torch.float32)
    for context in list_contexts(axis, case.size):
        first, *others = (case.run_sharded(context) for _ in range(3))
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_run_gives_the_same_bits_each_time(ranks):
    ranks(3).call(repeat)


def run_expanded() -> None:
    """As `y.sum().backward()` gives it: a gradient of one element, expanded."""
    axis = build_axis(2)
    case = Case(AttentionMask())
    for context in list_contexts(axis, case.size):
        q, k, v, _ = (take_own(x, context.order, axis.rank, dim=2).requires_grad_() for x in case.draw())
        expanded = torch.autograd.grad(attend(q, k, v, context).sum(), (q, k, v))
        whole = torch.autograd.grad(attend(q, k, v, context), (q, k, v), torch.ones_like(q))
        assert all(torch.equal(a, b) for a, b in zip(expanded, whole, strict=True))
        # As models have them: tokens before heads in memory.
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(attend(*views, context), attend(q, k, v, context))


def test_any_strides_of_a_gradient_will_do(ranks):
    ranks(2).call(run_expanded)


def run_few_tokens() -> None:
    axis = build_axis(4)
    for size in (0, 1, 3, 5):
        case = Case(AttentionMask(), size=size)
        for context in list_contexts(axis, size):
            found, expected = case.run_sharded(context), case.run_alone()
            assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_ranks_without_tokens_take_part(ranks):
    ranks(4).call(run_few_tokens)
