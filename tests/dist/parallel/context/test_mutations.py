"""Any mistake in attention over a context axis shows in a comparison with one device (FIELD 3.20)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.contract.context.attention import ContextMethod
from plait.contract.context.mask import AttentionMask
from plait.contract.context.tiles import Tile
from plait.parallel.context import exchange, gather, ring, tile, tokens
from plait.parallel.context.context import build_context
from plait.parallel.context.tile import Accumulator
from plait.sharding.token_order import Order
from tests.support.context_attention import Case, build_axis, find_error

ALL = tuple(ContextMethod)
RING = (ContextMethod.RING,)


def drop_the_last_block() -> AbstractContextManager[Any]:
    attend = ring._Forward.attend

    def attend_some(self: Any, owner: int) -> None:
        if owner != (self.site.axis.rank + 1) % self.site.axis.degree:
            attend(self, owner)

    return patch.object(ring._Forward, "attend", attend_some)


def drop_a_block_of_the_gradient() -> AbstractContextManager[Any]:
    attend = ring._Backward.attend

    def attend_some(self: Any, owner: int) -> None:
        attend(self, owner)
        if owner == (self.site.axis.rank + 1) % self.site.axis.degree:
            self.computed[owner].zero_()

    return patch.object(ring._Backward, "attend", attend_some)


def send_the_own_block_on() -> AbstractContextManager[Any]:
    """Each rank gets the keys of its neighbour at every hop."""
    return patch.object(ring._Forward, "find_rows", lambda self, _: self.blocks[self.site.axis.rank])


def forget_what_has_come_of_a_gradient() -> AbstractContextManager[Any]:
    sum_up = ring._Backward.sum

    def sum_own(self: Any, step: Any) -> None:
        if step.adds_own and step.adds_received:
            self.received.pop(step.owner)
            step = replace(step, adds_received=False)
        sum_up(self, step)

    return patch.object(ring._Backward, "sum", sum_own)


def add_tiles_up() -> AbstractContextManager[Any]:
    def add(self: Accumulator, own: Tile, out: torch.Tensor, lse: torch.Tensor) -> None:
        rows = slice(own.batch.start, own.batch.stop), slice(None), slice(own.q.start, own.q.stop)
        self.out[rows] += out
        self.lse[rows] = torch.logaddexp(self.lse[rows], lse)

    return patch.object(Accumulator, "merge", add)


def keep_the_log_sum_exp_of_the_last_tile() -> AbstractContextManager[Any]:
    merge = Accumulator.merge

    def merge_outputs(self: Accumulator, own: Tile, out: torch.Tensor, lse: torch.Tensor) -> None:
        merge(self, own, out, lse)
        self.lse[own.batch.start : own.batch.stop, :, own.q.start : own.q.stop] = lse

    return patch.object(Accumulator, "merge", merge_outputs)


def take_zigzag_for_the_order_of_the_sequence() -> AbstractContextManager[Any]:
    """The shards of all ranks one behind the other, as they come."""
    as_they_come = lambda x, order, *, dim=1: x  # noqa: E731
    return patch.multiple(gather, put_back=as_they_come, store=as_they_come)


def take_heads_for_those_of_the_sequence() -> AbstractContextManager[Any]:
    as_they_come = lambda x, order, *, dim=1: x  # noqa: E731
    return patch.multiple(exchange, put_back=as_they_come, store=as_they_come)


def take_contiguous_tokens() -> AbstractContextManager[Any]:
    take = tokens._join

    def take_next(x: torch.Tensor, chunks: Any, dim: int) -> torch.Tensor:
        return take(x, chunks[::-1], dim)

    return patch.object(tokens, "_join", take_next)


def see_one_token_more() -> AbstractContextManager[Any]:
    cut = tile.attend_plain

    def attend_wider(q: Any, k: Any, v: Any, bounds: Any, scale: float) -> Any:
        low, high = bounds
        return cut(q, k, v, (low, None if high is None else high + 1), scale)

    return patch.object(tile, "attend_plain", attend_wider)


def give_each_query_head_the_next_kv_head() -> AbstractContextManager[Any]:
    build = exchange.build_exchange_heads

    def build_shifted(num_heads: int, num_kv_heads: int, degree: int) -> list[tuple[range, range]]:
        heads = build(num_heads, num_kv_heads, degree)
        return [(query, heads[(rank + 1) % degree][1]) for rank, (query, _) in enumerate(heads)]

    return patch.object(exchange, "build_exchange_heads", build_shifted)


MISTAKES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], tuple[ContextMethod, ...]]] = {
    "nothing": (nullcontext, ()),
    "a block dropped": (drop_the_last_block, RING),
    "a block of the gradient dropped": (drop_a_block_of_the_gradient, RING),
    "the wrong rank's keys": (send_the_own_block_on, RING),
    "a gradient that has come forgotten": (forget_what_has_come_of_a_gradient, RING),
    "tiles added, not merged": (add_tiles_up, ALL),
    "the log-sum-exp not merged": (keep_the_log_sum_exp_of_the_last_tile, ALL),
    "gathered keys not put back in order": (take_zigzag_for_the_order_of_the_sequence, (ContextMethod.ALL_GATHER,)),
    "exchanged tokens not put back in order": (take_heads_for_those_of_the_sequence, (ContextMethod.ALL_TO_ALL,)),
    "chunks taken in the wrong order": (take_contiguous_tokens, ALL),
    "one token too many in a window": (see_one_token_more, ALL),
    "another KV head": (give_each_query_head_the_next_kv_head, (ContextMethod.ALL_TO_ALL,)),
}


def run_wrongly(mistake: str) -> dict[str, float]:
    """Errors against one device by method, in zigzag order with a window."""
    axis = build_axis(3)
    errors = {}
    case = Case(AttentionMask(window=9), 6, 3, size=24)
    for method in ContextMethod:
        context = build_context(axis, case.size, method=method, order=Order.ZIGZAG)
        with MISTAKES[mistake][0]():
            errors[str(method)] = find_error(case.run_sharded(context), case.run_alone())
    return errors


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found_and_no_other(ranks, mistake):
    affected = MISTAKES[mistake][1]
    for_all = ranks(3).call(run_wrongly, mistake=mistake)
    for method in ContextMethod:
        is_found = any(not errors[method] <= 1e-12 for errors in for_all)
        assert is_found == (method in affected), (method, for_all)
