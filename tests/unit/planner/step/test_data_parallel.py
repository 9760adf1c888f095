"""Data parallelism: who exchanges what, how often, and what of it is hidden."""

from collections import Counter
from dataclasses import replace

import pytest

from plait.config.model import GptConfig, LlamaConfig
from plait.config.precision import PrecisionConfig
from plait.config.run import RunConfig
from plait.contract.axis.fsdp import count_moves
from plait.contract.collective import Collective
from plait.contract.training import derive_run_model
from plait.planner.plan_config import PlanConfig
from plait.planner.run_config import build_run_config
from plait.sharding import Kind
from tests.support.plans import GPT, LLAMA, predict_small

GPT_WITHOUT_DROPOUT = GPT.model_copy(update={"attention_dropout": 0.0})


def _list_exchanges(plan: PlanConfig, batches: int = 4) -> Counter[tuple[Kind, int]]:
    issued = predict_small(plan, batches=batches).step.count_collectives()
    found: Counter[tuple[Kind, int]] = Counter()
    for move, count in issued.items():
        if move.axis.startswith("dp"):
            found[move.kind, move.degree] += count
    return found


def test_what_is_sharded_says_what_is_exchanged() -> None:
    assert _list_exchanges(PlanConfig(dp_replicate=8, sharded="nothing")) == {(Kind.ALL_REDUCE, 8): 1}
    optimizer = {(Kind.ALL_GATHER, 8): 1, (Kind.REDUCE_SCATTER, 8): 1}
    assert _list_exchanges(PlanConfig(dp_shard=8)) == optimizer
    assert _list_exchanges(PlanConfig(dp_shard=8, sharded="gradients")) == optimizer | {(Kind.REDUCE_SCATTER, 8): 4}
    fsdp = {(Kind.ALL_GATHER, 8): 4 * (1 + 2 * 32), (Kind.REDUCE_SCATTER, 8): 1 + 32}
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


@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        (PlanConfig(dp_shard=4, sharded="parameters"), 1),
        (PlanConfig(dp_shard=4, sharded="parameters"), 4),
        (PlanConfig(tp=2, dp_shard=3, sharded="parameters", precision=PrecisionConfig(reduce="float32")), 4),
        (PlanConfig(dp_shard=2, dp_replicate=2, sharded="parameters"), 4),
        (PlanConfig(cp=2, dp_shard=2, sharded="parameters"), 4),
        (PlanConfig(pp=2, dp_shard=2, sharded="parameters"), 4),
        (PlanConfig(pp=2, interleave=2, dp_shard=2, dp_replicate=2, sharded="parameters"), 4),
        (PlanConfig(pp=4, tp=2, dp_shard=2, sharded="parameters"), 2),
    ],
)
@pytest.mark.parametrize("model", [LLAMA, LLAMA.model_copy(update={"tied_embeddings": True}), GPT_WITHOUT_DROPOUT])
def test_what_parameters_shared_out_move_is_what_the_written_run_moves(
    plan: PlanConfig, batches: int, model: LlamaConfig | GptConfig
) -> None:
    """Of the rank of the pipeline that has most: kinds, axes, shapes and number formats, and how often each."""
    prediction = predict_small(plan, model=model, batches=batches)
    run = build_run_config(prediction, RunConfig(model=model))
    ranks = []
    for pp_rank in range(plan.pp):
        promised: Counter[Collective] = Counter()
        for move, count in count_moves(run, derive_run_model(run), pp_rank):
            promised[move] += count
        ranks.append(promised)
    most = max(ranks, key=_count_bytes)
    assert {m: n for m, n in prediction.step.count_collectives().items() if m.axis.startswith("dp")} == most


def _count_bytes(moves: Counter[Collective]) -> int:
    return sum(move.payload_bytes * count for move, count in moves.items())


def test_stages_that_are_gathered_once_hide_nothing() -> None:
    step = predict_small(PlanConfig(pp=2, dp_shard=4, sharded="parameters")).step
    for name in ("gather blocks", "reduce blocks", "gather around blocks", "reduce around blocks"):
        assert step.find(name).hidden_s == 0.0
    alone = predict_small(PlanConfig(dp_shard=4, sharded="parameters"), seq_len=8192).step
    assert alone.find("gather blocks").hidden_s > alone.find("gather blocks").seconds
    assert alone.find("gather around blocks").hidden_s == 0.0
