"""A tile by torch's kernels and by the definition, forward and as a part of a row's gradient."""

import itertools
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.comm.mesh import Axis
from plait.contract.context.mask import AttentionMask
from plait.contract.context.tiles import Tile
from plait.parallel.context import plain, tile
from plait.parallel.context.context import build_context
from plait.parallel.context.fused import find_kernel
from plait.parallel.context.plain import attend_plain, attend_plain_backward
from plait.parallel.context.tile import Accumulator
from plait.sharding import Interval
from tests.support.context_attention import MASKS, Case, find_error

ALONE = Axis("cp", 1, 0, (0,), None, None)


def draw(num_q: int, num_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, num_q, 8), (2, 2, num_k, 8), (2, 2, num_k, 8), (2, 4, num_q, 8))
    q, k, v, grad = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)
    return q, k, v, grad


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_the_kernel_and_the_definition_agree(is_causal, dtype, tolerance):
    q, k, v, grad = draw(31, 31 if is_causal else 17, dtype)
    kernel = find_kernel(q)
    assert kernel is not None
    bounds = (0 if is_causal else None, None)
    out, lse = kernel.forward(q, k, v, is_causal, 0.3)
    plain_out, plain_lse = attend_plain(q, k, v, bounds, 0.3)
    assert find_error([out, lse], [plain_out, plain_lse]) <= tolerance
    delta = (grad * out).sum(-1)
    found = kernel.backward(grad, q, k, v, out, lse, is_causal, 0.3)
    assert find_error([*found], [*attend_plain_backward(grad, q, k, v, lse, delta, bounds, 0.3)]) <= tolerance


def test_a_query_that_sees_nothing_has_no_output_no_weight_and_no_gradient():
    q, k, v, grad = draw(6, 4, torch.float64)
    bounds = (3, None)  # the first three queries see nothing
    out, lse = attend_plain(q, k, v, bounds, 1.0)
    assert torch.equal(out[:, :, :3], torch.zeros_like(out[:, :, :3]))
    assert bool((lse[:, :, :3] == float("-inf")).all())
    grad_q, *others = attend_plain_backward(grad, q, k, v, lse, (grad * out).sum(-1), bounds, 1.0)
    assert torch.equal(grad_q[:, :, :3], torch.zeros_like(grad_q[:, :, :3]))
    assert all(bool(x.isfinite().all()) for x in (grad_q, *others))


def test_tiles_merge_to_the_whole_in_any_order():
    q, k, v, _ = draw(12, 15, torch.float64)
    whole, lse = attend_plain(q, k, v, (None, None), 1.0)
    every = Interval(0, 12)
    parts = [Interval(0, 1), Interval(1, 9), Interval(9, 15)]
    for order in itertools.permutations(parts):
        seen = Accumulator(q)
        for rows in order:
            own = slice(rows.start, rows.stop)
            seen.merge(
                Tile(Interval(0, 2), every, rows), *attend_plain(q, k[:, :, own], v[:, :, own], (None, None), 1.0)
            )
        assert find_error([seen.out, seen.lse], [whole, lse]) <= 1e-14


def test_large_scores_are_merged_without_overflow():
    q, k, v, _ = draw(3, 4, torch.float32)
    seen = Accumulator(q)
    every = Interval(0, 3)
    for rows, scale in ((slice(0, 2), 300.0), (slice(2, 4), -300.0)):
        seen.merge(Tile(Interval(0, 2), every, Interval(rows.start, rows.stop)), *attend_plain(
            q, k[:, :, rows], v[:, :, rows], (None, None), scale
        ))  # fmt: skip
    assert bool(seen.out.isfinite().all())


@pytest.mark.parametrize("mask", MASKS)
def test_where_there_is_no_kernel_the_definition_does_it_all_a_few_rows_at_a_time(mask):
    case = Case(MASKS[mask])
    with patch.object(tile, "find_kernel", lambda q: None), patch.object(plain, "MAX_ROWS", 5):
        found = case.run_sharded(build_context(ALONE, case.size))
    assert find_error(found, case.run_alone()) <= 1e-12


def test_a_mask_is_never_larger_than_a_few_rows():
    largest = 0
    score = plain._score

    def score_measured(*args: object) -> Tensor:
        nonlocal largest
        scores = score(*args)
        largest = max(largest, scores.shape[-1] * scores.shape[-2])
        return scores

    case = Case(AttentionMask(window=700), size=1500, batch=1)
    with patch.object(plain, "_score", score_measured):
        case.run_sharded(build_context(ALONE, case.size))
    assert 0 < largest <= 256 * 256


def test_the_kernels_of_cuda_take_what_they_are_given():
    """Shapes and arguments only: no number is computed."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 2, 24, 64, dtype=torch.bfloat16, device="cuda")
        kernel = find_kernel(q)
        assert kernel is not None
        assert kernel is not find_kernel(torch.empty(1))
        out, lse = kernel.forward(q, k, k, False, 0.1)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
        assert [x.shape for x in kernel.backward(out, q, k, k, out, lse, False, 0.1)] == [q.shape, k.shape, k.shape]
        assert find_kernel(q.float()) is None
