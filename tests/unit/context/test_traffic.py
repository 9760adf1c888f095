import pytest
from hypothesis import given

from plait.contract.context.attention import AttentionSize, ContextMethod, ContextPlan
from plait.contract.context.balance import derive_balance
from plait.contract.context.heads import build_exchange_heads
from plait.contract.context.mask import AttentionMask, build_documents
from plait.contract.context.traffic import derive_context_traffic
from plait.errors import ShardingError
from plait.schedule.context import build_ring_backward, build_ring_forward
from plait.sharding import Kind
from plait.sharding.token_order import Order, build_order
from tests.support.context_strategies import plans

SIZE = AttentionSize(batch=2, num_heads=8, num_kv_heads=2, head_width=16, dtype="bfloat16", sum_dtype="float32")
RING_AND_GATHER = (ContextMethod.RING, ContextMethod.ALL_GATHER)


def build_plan(size: int, degree: int, mask: AttentionMask, order: Order = Order.ZIGZAG) -> ContextPlan:
    return ContextPlan(build_order(order, size, degree), mask, SIZE.batch)


@given(plans())
def test_the_ring_sends_what_its_schedule_says(plan: ContextPlan) -> None:
    traffic = derive_context_traffic(plan, SIZE, ContextMethod.RING)
    needs = plan.needs
    for promised, build in ((traffic.forward, build_ring_forward), (traffic.backward, build_ring_backward)):
        sent = [
            (message.tensor, message.piece.owner, message.source, message.target)
            for rank in range(plan.degree)
            for message in build(needs, plan.order.split, rank).messages_sent
        ]
        listed = [(each.tensor, each.owner, each.source, each.target) for each in promised.passages]
        assert sorted(sent) == sorted(listed)


def test_a_ring_in_which_everybody_sees_all_sends_as_much_as_collectives_do_and_issues_none() -> None:
    plan = build_plan(64, 4, AttentionMask())
    ring, gather = (derive_context_traffic(plan, SIZE, method) for method in RING_AND_GATHER)
    assert (ring.forward.collectives, ring.backward.collectives) == ((), ())
    assert [each.kind for each in gather.forward.collectives] == [Kind.ALL_GATHER]
    assert [each.kind for each in gather.backward.collectives] == [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
    kv_bytes = 64 * 2 * SIZE.batch * SIZE.num_kv_heads * SIZE.head_width * 2
    for rank in range(4):
        assert ring.forward.sent_bytes(rank) == gather.forward.sent_bytes(rank) == kv_bytes * 3 / 4
        assert ring.backward.sent_bytes(rank) == gather.backward.sent_bytes(rank) == 3 * kv_bytes * 3 / 4


def test_contiguous_parts_send_half_of_it_under_a_causal_mask_and_a_window_less() -> None:
    sent = {}
    for name, order, mask in (
        ("full", Order.CONTIGUOUS, AttentionMask(causal=False)),
        ("causal", Order.CONTIGUOUS, AttentionMask()),
        ("window", Order.CONTIGUOUS, AttentionMask(window=8)),
        ("window in zigzag", Order.ZIGZAG, AttentionMask(window=8)),
    ):
        traffic = derive_context_traffic(build_plan(64, 4, mask, order), SIZE, ContextMethod.RING)
        sent[name] = sum(map(traffic.forward.sent_bytes, range(4)))
    block = 16 * 2 * SIZE.batch * SIZE.num_kv_heads * SIZE.head_width * 2
    assert sent == {"full": 12 * block, "causal": 6 * block, "window": 3 * block, "window in zigzag": 10 * block}


def test_documents_that_no_two_ranks_share_send_nothing() -> None:
    mask = AttentionMask(documents=build_documents([[16, 16, 16, 16]]))
    plan = build_plan(64, 4, mask, Order.CONTIGUOUS)
    traffic = derive_context_traffic(plan, SIZE, ContextMethod.RING)
    assert (traffic.forward.collectives, traffic.backward.passages) == ((), ())
    assert plan.needs.num_skipped == 12


def test_an_exchange_moves_queries_too_and_keys_as_often_as_ranks_have_them() -> None:
    plan = build_plan(64, 4, AttentionMask())
    traffic = derive_context_traffic(plan, SIZE, ContextMethod.ALL_TO_ALL)
    shapes = [(each.kind, each.shape, each.dim) for each in traffic.forward.collectives]
    assert shapes == [(Kind.ALL_TO_ALL, (64, 8 + 2 * 4, 2, 16), 1), (Kind.ALL_TO_ALL, (64, 8, 2, 16), 0)]
    backward = [(each.kind, each.shape, each.dim) for each in traffic.backward.collectives]
    assert backward == [(Kind.ALL_TO_ALL, (64, 8, 2, 16), 1), (Kind.ALL_TO_ALL, (64, 16, 2, 16), 0)]


def test_one_rank_moves_nothing() -> None:
    for method in ContextMethod:
        traffic = derive_context_traffic(build_plan(9, 1, AttentionMask()), SIZE, method)
        assert (traffic.forward.collectives, traffic.backward.collectives) == ((), ())


def test_heads_are_dealt_in_groups_or_within_one() -> None:
    assert build_exchange_heads(8, 2, 2) == [(range(4), range(1)), (range(4, 8), range(1, 2))]
    assert build_exchange_heads(4, 1, 2) == [(range(2), range(1)), (range(2, 4), range(1))]
    with pytest.raises(ShardingError, match=r"^all_to_all over a context axis of degree 4 .* only 2 query heads"):
        build_exchange_heads(2, 1, 4)


def test_work_is_counted_by_rank_and_by_head() -> None:
    plan = build_plan(32, 4, AttentionMask())
    ring = derive_balance(plan, ContextMethod.RING, num_heads=8, num_kv_heads=2)
    assert ring.total == 8 * 2 * 32 * 33 // 2
    assert ring.imbalance == 1.0
    assert {(work.tokens, work.blocks, work.skipped) for work in ring.ranks} == {(8, 4, 0)}
    two = build_plan(32, 2, AttentionMask())
    exchange = derive_balance(two, ContextMethod.ALL_TO_ALL, num_heads=3, num_kv_heads=3)
    assert [work.visible for work in exchange.ranks] == [2 * 2 * 32 * 33 // 2, 2 * 32 * 33 // 2]
    assert str(ring).splitlines()[-1] == "busiest rank / mean: 1.000"
