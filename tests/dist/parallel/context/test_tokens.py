"""What goes with the tokens follows them: positions, labels, loss weights, rotary angles."""

import pytest
import torch

from plait.comm import trace
from plait.config.model import LlamaConfig
from plait.contract.context.mask import AttentionMask
from plait.models.rope import RopeTables, apply_rope, build_rope_tables
from plait.parallel.context.attention import attend
from plait.parallel.context.tokens import gather, list_positions, take_own
from tests.support.context_attention import Case, build_axis, find_error, list_contexts


def follow(degree: int) -> None:
    axis, size = build_axis(degree), 23
    ids = torch.arange(3 * size).view(3, size)
    labels, weights = ids.roll(-1, 1), (ids % 3).float()
    for context in list_contexts(axis, size):
        order = context.order
        own = [take_own(x, order, axis.rank) for x in (ids, labels, weights)]
        assert torch.equal(own[0] % size, list_positions(order, axis.rank).expand(3, -1))
        with trace.record() as recorded:
            assert all(torch.equal(gather(x, axis, order), y) for x, y in zip(own, (ids, labels, weights), strict=True))
        assert len(recorded.collectives) == (3 if degree > 1 else 0)


@pytest.mark.parametrize("degree", [2, 3])
def test_a_ranks_own_entries_are_put_back_as_they_were(ranks, degree):
    ranks(degree).call(follow, degree=degree)


def rotate() -> None:
    """A model's own use: tables for the positions of the own tokens."""
    axis, case = build_axis(3), Case(AttentionMask())
    config = LlamaConfig(
        num_layers=1, width=32, num_heads=4, num_kv_heads=2, mlp_width=8, vocab_size=8, max_seq_len=case.size
    )
    q, k, v, _ = case.draw()
    tables = build_rope_tables(config, torch.arange(case.size), q)
    rotated = [apply_rope(x.transpose(1, 2), tables).transpose(1, 2) for x in (q, k)]
    expected = torch.nn.functional.scaled_dot_product_attention(*rotated, v, is_causal=True, enable_gqa=True)
    for context in list_contexts(axis, case.size):
        own_q, own_k, own_v = (take_own(x, context.order, axis.rank, dim=2) for x in (q, k, v))
        positions = list_positions(context.order, axis.rank)
        own_tables = RopeTables(tables.cos[positions], tables.sin[positions])
        own_q, own_k = (apply_rope(x.transpose(1, 2), own_tables).transpose(1, 2) for x in (own_q, own_k))
        y = gather(attend(own_q, own_k, own_v, context), axis, context.order, dim=2)
        assert find_error([y], [expected]) <= 1e-12


def test_rotary_positions_follow_the_tokens(ranks):
    ranks(3).call(rotate)
