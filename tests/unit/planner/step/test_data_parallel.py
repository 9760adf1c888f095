"""Data parallelism: who exchanges what, how often, and what of it is hidden."""

from dataclasses import replace

import pytest

from plait.planner.plan_config import PlanConfig
from plait.sharding import Kind
from tests.support.plans import LLAMA, predict_small


def _list_exchanges(plan: PlanConfig, batches: int = 4) -> dict[tuple[Kind, int], int]:
    issued = predict_small(plan, batches=batches).step.count_collectives()
    return {(move.kind, move.degree): count for move, count in issued.items() if move.axis == "dp"}


def test_what_is_sharded_says_what_is_exchanged() -> None:
    assert _list_exchanges(PlanConfig(dp_replicate=8, sharded="nothing")) == {(Kind.ALL_REDUCE, 8): 1}
    optimizer = {(Kind.ALL_GATHER, 8): 1, (Kind.REDUCE_SCATTER, 8): 1}
    assert _list_exchanges(PlanConfig(dp_shard=8)) == optimizer
    assert _list_exchanges(PlanConfig(dp_shard=8, sharded="gradients")) == optimizer | {(Kind.REDUCE_SCATTER, 8): 4}
    fsdp = {(Kind.ALL_GATHER, 8): 8, (Kind.REDUCE_SCATTER, 8): 4}
    assert _list_exchanges(PlanConfig(dp_shard=8, sharded="parameters")) == fsdp


def test_copies_of_the_shards_sum_a_share_each() -> None:
    plan = PlanConfig(dp_shard=4, dp_replicate=2)
    issued = predict_small(plan).step.count_collectives()
    (total,) = [move for move in issued if move.axis == "dp" and move.kind is Kind.ALL_REDUCE]
    assert (total.degree, total.shape) == (2, (-(-LLAMA.num_parameters // 4),))


def test_ranks_of_cp_sum_gradients_too() -> None:
    assert (Kind.REDUCE_SCATTER, 8) in _list_exchanges(PlanConfig(cp=2, dp_shard=4))


def test_gradients_hide_beneath_backward_but_for_the_last_bucket() -> None:
    plan = PlanConfig(dp_shard=8)
    hidden, shown = (
        predict_small(replace(plan, overlaps_gradients=overlaps), batches=4, seq_len=4096).step.find(
            "scatter gradients"
        )
        for overlaps in (True, False)
    )
    assert shown.hidden_s == 0.0
    assert hidden.seconds + hidden.hidden_s == pytest.approx(shown.seconds)
    # A block's share of it stays, and what hides takes a share of the GEMMs above it.
    assert hidden.seconds == pytest.approx(shown.seconds * (1 / 32 + 0.12 * 31 / 32), rel=1e-6)


def test_the_optimizer_updates_a_share() -> None:
    one, eight = (predict_small(PlanConfig(dp_shard=shard)).optimizer_s for shard in (1, 8))
    assert one == pytest.approx(8 * eight, rel=0.01)
