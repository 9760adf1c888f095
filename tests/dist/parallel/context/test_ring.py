"""What is special to the ring: long messages, links without tags, and runs that were left in the middle."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from plait.comm.mesh import build_mesh
from plait.contract.context.attention import ContextPlan
from plait.contract.context.mask import AttentionMask
from plait.errors import TransportError
from plait.overlap.transport.stream import StreamLink
from plait.parallel.context import link, ring
from plait.parallel.context.attention import attend
from plait.parallel.context.context import build_context
from plait.parallel.context.packed import pack
from plait.parallel.context.tokens import gather, take_own
from plait.sharding import MeshShape
from plait.sharding.token_order import Order
from tests.support.context_attention import MASKS, SIZE, Case, build_axis, find_error, list_contexts


def run_without_tags(degree: int) -> float:
    """As between CUDA devices: all messages in one order, that of their rounds, on a stream of their own."""
    axis = build_axis(degree)
    device = torch.device("cpu")
    link._links[axis] = {device: StreamLink(axis, device)}
    worst = 0.0
    for mask in MASKS.values():
        for order in Order:
            case = Case(mask)
            worst = max(worst, find_error(case.run_sharded(build_context(axis, SIZE, order=order)), case.run_alone()))
    return worst


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_link_without_tags_takes_every_round_in_order(ranks, degree):
    assert all(worst <= 1e-12 for worst in ranks(degree).call(run_without_tags, degree=degree))


def run_long() -> float:
    """Half a megabyte and more in each message, of uneven lengths."""
    axis, size = build_axis(3), 1537
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(1, 2, size, 64, dtype=torch.float64, generator=generator) for _ in range(4))
    context = build_context(axis, size)
    own_q, own_k, own_v, own_grad = (take_own(x, context.order, axis.rank, dim=2) for x in (q, k, v, grad))
    own = [x.requires_grad_() for x in (own_q, own_k, own_v)]
    y = attend(*own, context)
    found = [gather(x, axis, context.order, dim=2) for x in (y, *torch.autograd.grad(y, own, own_grad))]
    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    return find_error(found, [expected.detach(), *torch.autograd.grad(expected, whole, grad)])


def test_long_messages_arrive_whole(ranks):
    assert all(error <= 1e-12 for error in ranks(3).call(run_long))


def train_with_recompute() -> None:
    axis, case = build_axis(2), Case(AttentionMask())
    for method in ("ring", "all_gather", "all_to_all"):
        context = build_context(axis, SIZE, method=method)
        q, k, v, grad = (take_own(x, context.order, axis.rank, dim=2) for x in case.draw())
        own = [x.requires_grad_() for x in (q, k, v)]
        kept = torch.autograd.grad(attend(*own, context), own, grad)
        again = torch.utils.checkpoint.checkpoint(attend, *own, context, use_reentrant=False)
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again, own, grad), kept, strict=True))


def test_attention_can_be_recomputed(ranks):
    ranks(2).call(train_with_recompute)


def move_integers() -> None:
    """What comes is looked at, not attended, and each gradient is a number that says whose it is."""
    axis, size = build_axis(4), 23
    for name, mask in MASKS.items():
        case = Case(mask)
        for order in Order:
            context = build_context(axis, size, order=order)
            plan = ContextPlan(context.order, mask, case.batch)
            needs = plan.needs
            _, whole_k, whole_v, _ = case.draw()
            seen: list[int] = []

            def look(self, owner, order=context.order, k=whole_k, v=whole_v, seen=seen):
                own = [take_own(x, order, owner, dim=2) for x in (k, v)]
                assert torch.equal(self.blocks[owner], pack(*own))
                seen.append(owner)

            def give(self, owner):
                self.computed[owner] = torch.full_like(self.blocks[owner], 10.0**axis.rank)

            with patch.object(ring._Forward, "attend", look), patch.object(ring._Backward, "attend", give):
                q, k, v, grad = (take_own(x, context.order, axis.rank, dim=2).requires_grad_() for x in case.draw())
                grads = torch.autograd.grad(attend(q, k, v, context, mask), (k, v), grad)
            assert sorted(seen) == [owner for owner in range(4) if needs.table[axis.rank][owner]], name
            wanted = sum(10.0**rank for rank in range(4) if needs.table[rank][axis.rank])
            assert all(torch.equal(x, torch.full_like(x, wanted)) for x in grads), name


def test_blocks_arrive_bit_for_bit_and_each_gradient_once(ranks):
    ranks(4).call(move_integers)


def run_in_mesh() -> list[float]:
    """Context axes beside others: of neighbouring ranks, and of ranks that are apart; with memory that they share."""
    mesh = build_mesh(MeshShape(dp_replicate=2, tp=2), shared_memory=True)
    assert mesh.tp.shared is not None
    errors = []
    for axis in (mesh.tp, mesh.dp):
        for context in list_contexts(replace(axis, name="cp"), SIZE):
            case = Case(MASKS["documents"])
            errors.append(find_error(case.run_sharded(context), case.run_alone()))
    return errors


def test_a_context_axis_may_be_one_of_several(ranks):
    for errors in ranks(4).call(run_in_mesh):
        assert max(errors) <= 1e-12


def leave_in_the_middle() -> None:
    axis, case = build_axis(2), Case(AttentionMask())
    context = build_context(axis, SIZE)
    case.run_sharded(context)

    def refuse(*_: object) -> None:
        raise ValueError("boom")

    with patch.object(ring._Forward, "attend", refuse), pytest.raises(ValueError, match="boom"):
        case.run_sharded(context)
    with pytest.raises(TransportError, match=r"an earlier run was left in the middle: value kv\["):
        case.run_sharded(context)
    raise TransportError("what is on its way spoils these ranks")


def test_after_a_run_that_was_left_nothing_is_taken_for_what_is_new(ranks):
    """Last in this file, as it spoils its ranks."""
    with pytest.raises(TransportError, match="spoils these ranks"):
        ranks(2).call(leave_in_the_middle)
