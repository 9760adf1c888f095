"""What attention moves is what its contract says, and what it computes are the tiles of its plan."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from plait.comm import trace
from plait.contract.context.attention import AttentionSize, ContextMethod, ContextPlan
from plait.contract.context.balance import derive_balance
from plait.contract.context.traffic import Traffic, derive_context_traffic
from plait.errors import ShardingError
from plait.parallel.context.attention import attend
from plait.parallel.context.tile import Accumulator
from plait.parallel.context.tokens import take_own
from tests.support.context_attention import HEAD_WIDTH, MASKS, SIZE, Case, build_axis, list_contexts


def describe_moved(entry: trace.Moved) -> tuple[str, int, int, int, int]:
    message = entry.message
    return message.tensor, message.piece.owner, message.source, message.target, entry.num_bytes


def list_promised(traffic: Traffic, rank: int, direction: str) -> list[tuple[str, int, int, int, int]]:
    end = "source" if direction == "sent" else "target"
    return [
        (each.tensor, each.owner, each.source, each.target, each.num_bytes)
        for each in traffic.passages
        if getattr(each, end) == rank
    ]


def check(recorded: trace.Trace, promised: Traffic, rank: int) -> None:
    assert tuple(recorded.collectives) == promised.collectives
    for direction in ("sent", "received"):
        moved = [describe_moved(entry) for entry in recorded.moved if entry.direction == direction]
        assert sorted(moved) == sorted(list_promised(promised, rank, direction))
    assert all(label.startswith("here") for label in recorded.labels)


def run_traced(degree: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> int:
    axis = replace(build_axis(degree), reduce_dtype=reduce_dtype)
    rank, num_checked = axis.rank, 0
    for mask in MASKS.values():
        case = Case(mask, dtype=dtype)
        sum_dtype = str(reduce_dtype or torch.promote_types(dtype, torch.float32)).removeprefix("torch.")
        size = AttentionSize(case.batch, 4, 2, HEAD_WIDTH, str(dtype).removeprefix("torch."), sum_dtype)
        for context in list_contexts(axis, SIZE):
            q, k, v, grad = (take_own(x, context.order, rank, dim=2) for x in case.draw())
            for x in (q, k, v):
                x.requires_grad_()
            traffic = derive_context_traffic(ContextPlan(context.order, mask, case.batch), size, context.method)
            with trace.record() as forward:
                y = attend(q, k, v, context, mask, label="here")
            with trace.record() as backward:
                torch.autograd.grad(y, (q, k, v), grad)
            check(forward, traffic.forward, rank)
            check(backward, traffic.backward, rank)
            num_checked += 1
    return num_checked


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_what_moves_is_what_the_contract_says(ranks, degree):
    assert set(ranks(degree).call(run_traced, degree=degree, dtype=torch.float32, reduce_dtype=None)) == {60}


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_keys_travel_in_their_dtype_and_gradients_in_the_declared_one(ranks, reduce_dtype):
    ranks(3).call(run_traced, degree=3, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)


def count_computed() -> None:
    axis = build_axis(4)
    merge = Accumulator.merge
    for mask in MASKS.values():
        case = Case(mask)
        for context in list_contexts(axis, SIZE):
            computed = []

            def merge_counted(self, tile, out, lse, computed=computed):
                computed.append((tile.num_scores, tile.num_visible))
                merge(self, tile, out, lse)

            with patch.object(Accumulator, "merge", merge_counted):
                case.run_sharded(context)
            plan = ContextPlan(context.order, mask, case.batch)
            work = derive_balance(plan, context.method, num_heads=4, num_kv_heads=2).ranks[axis.rank]
            heads = 4 if context.method is not ContextMethod.ALL_TO_ALL else 1
            assert heads * sum(scores for scores, _ in computed) == work.computed
            assert heads * sum(visible for _, visible in computed) == work.visible


def test_each_rank_computes_the_work_that_its_balance_says_and_skips_what_is_hidden(ranks):
    ranks(4).call(count_computed)


def disagree(how: str) -> None:
    axis = build_axis(3)
    other = axis.rank == 1
    case = Case(MASKS["documents" if other and how == "mask" else "causal"])
    contexts = list_contexts(axis, SIZE)
    case.run_sharded(contexts[3 if other and how == "order" else 2])


def test_ranks_with_other_masks_or_orders_are_told_before_anything_moves(ranks):
    with pytest.raises(ShardingError) as caught:
        ranks(3).call(disagree, how="mask")
    first, *rest = caught.value.message.splitlines()
    assert first == "the ranks of axis 'cp' would not run one attention:"
    sizes = "batch 2, 4 heads over 2, width 8, float64, sums in float64"
    told = f"all_gather of 23 tokens dealt as 0:8 | 8:16 | 16:23; {sizes}"
    assert rest == [f"  ranks 0, 2: {told}; causal", f"  rank 1: {told}; causal, documents 5+9+1+8; 17+2+4"]
    assert "take the same batch" in caught.value.hint
    ranks(3).call(disagree, how="not at all")


def note_ring() -> list[str]:
    axis = build_axis(2)
    context = list_contexts(axis, SIZE)[0]
    q, k, v, grad = (take_own(x, context.order, axis.rank, dim=2) for x in Case(MASKS["causal"]).draw())
    y = attend(q.requires_grad_(), k, v, context, label="here")
    noted = [trace.last_collective()]
    torch.autograd.grad(y, q, grad)
    noted.append(trace.last_collective())
    return [each.text for each in noted if each is not None]


def test_a_ring_is_noted_so_that_a_rank_that_fails_says_where_it_was(ranks):
    """The same on all ranks, though each sends something else; no trace takes it for a collective."""
    texts = [f"ring [23x2x2x2x8] float64 over cp (here: {what})" for what in ("k, v", "dk, dv")]
    assert ranks(2).call(note_ring) == [texts, texts]
