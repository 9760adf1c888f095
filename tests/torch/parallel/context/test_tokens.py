import pytest
import torch

from plait.comm.mesh import Axis
from plait.contract.context.mask import AttentionMask, build_documents
from plait.errors import ConfigError, ShardingError
from plait.parallel.context.attention import attend
from plait.parallel.context.context import Context, build_context
from plait.parallel.context.tokens import (
    find_documents,
    list_document_positions,
    list_positions,
    put_back,
    store,
    take_own,
)
from plait.sharding import Interval
from plait.sharding.token_order import Order, build_order

ORDER = build_order(Order.ZIGZAG, 10, 2)
"""0:3, 3:6, 6:8, 8:10: rank 0 has the first and the last, rank 1 the two between."""


def test_a_rank_takes_its_chunks_and_all_of_them_are_put_back():
    x = torch.arange(20).view(2, 10)
    shards = [take_own(x, ORDER, rank) for rank in range(2)]
    assert shards[0].tolist() == [[0, 1, 2, 8, 9], [10, 11, 12, 18, 19]]
    assert shards[1][0].tolist() == [3, 4, 5, 6, 7] == list_positions(ORDER, 1).tolist()
    together = torch.cat(shards, 1)
    assert torch.equal(put_back(together, ORDER), x)
    assert torch.equal(store(x, ORDER), together)


def test_putting_back_has_a_gradient_that_is_taken_apart():
    x = torch.randn(10, 3, requires_grad=True)
    weights = torch.arange(10.0).unsqueeze(1)
    (put_back(x, ORDER, dim=0) * weights).sum().backward()
    assert torch.equal(x.grad, store(weights, ORDER, dim=0).expand(10, 3))


def test_positions_begin_anew_in_each_document():
    mask = AttentionMask(documents=build_documents([[4, 6], [7]]))
    whole = build_order(Order.CONTIGUOUS, 10, 1)
    positions = list_document_positions(mask, 2, whole, 0)
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0, 0, 0]]
    assert list_document_positions(mask, 2, ORDER, 0).tolist() == [[0, 1, 2, 4, 5], [0, 1, 2, 0, 0]]
    assert list_document_positions(AttentionMask(), 2, ORDER, 1).tolist() == [[3, 4, 5, 6, 7]] * 2


def test_documents_are_found_by_their_ids():
    ids = torch.tensor([[7, 7, 7, 2, 2], [-1, 0, 0, -1, -1]])
    assert find_documents(ids) == ((Interval(0, 3), Interval(3, 5)), (Interval(1, 3),))
    assert find_documents(torch.zeros(2, 0, dtype=torch.int64)) == ((), ())
    with pytest.raises(ShardingError, match=r"^document ids are \[B, S\] integers, not \[3\] torch.float32"):
        find_documents(torch.zeros(3))


def test_tensors_that_are_not_of_the_own_tokens_are_refused():
    with pytest.raises(ShardingError, match=r"^take_own: \[2, 9\] should have the 10 tokens of a sequence in dim 1"):
        take_own(torch.zeros(2, 9), ORDER, 0)
    with pytest.raises(ConfigError, match="^context method 'rings' is not known(.|\n)*did you mean \"ring\"?"):
        build_context(Axis("cp", 2, 1, (0, 1), None, None), 10, method="rings")
    lone = Axis("cp", 2, 1, (0, 1), None, None)
    context = build_context(lone, 10)
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ShardingError, match=r"^here: rank 1 on 'cp' of degree 2 has q \[1, 4, 10, 8\].* 5, H\]"):
        attend(torch.zeros(1, 4, 10, 8), k, k, context, label="here")
    with pytest.raises(ShardingError, match="^here: .* 4 query heads do not read 3 KV heads of the same width"):
        attend(q, *[torch.zeros(1, 3, 5, 8)] * 2, context, label="here")
    with pytest.raises(ShardingError, match=r"^here: torch.float32 queries, torch.float64 keys"):
        attend(q, k.double(), k.double(), context, label="here")
    with pytest.raises(ShardingError, match="^a mask has documents for 2 rows, but the batch has 1"):
        attend(q, k, k, context, AttentionMask(documents=((), ())), label="here")
    with pytest.raises(ShardingError, match="^tokens are dealt to 2 ranks, but axis 'cp' is of degree 1"):
        Context(Axis("cp", 1, 0, (0,), None, None), context.method, ORDER)
    exchange = build_context(Axis("cp", 8, 1, tuple(range(8)), None, None), 80, method="all_to_all")
    with pytest.raises(ShardingError, match="^all_to_all over a context axis of degree 8 .* only 4 query heads"):
        attend(*[torch.zeros(1, 4, 10, 8)] * 3, exchange, label="here")
