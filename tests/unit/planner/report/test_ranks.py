import pytest

from plait.planner.plan_config import PlanConfig
from plait.planner.report.ranks import list_rank_memory
from tests.support.planned_report import predict_one


@pytest.mark.parametrize(
    "plan",
    [
        PlanConfig(),
        PlanConfig(tp=4, dp_shard=2, sharded="parameters"),
        PlanConfig(tp=2, pp=4, interleave=2, recompute="selective"),
        PlanConfig(tp=3, pp=2),
    ],
)
def test_the_worst_of_all_ranks_is_what_is_predicted(plan: PlanConfig) -> None:
    prediction = predict_one(plan)
    ranks = list_rank_memory(prediction)
    worst = max(ranks, key=lambda rank: sum(rank.parts.values()))
    assert worst.parts == dict(prediction.memory.parts)
    assert worst.stage == prediction.memory.stage
    assert {rank.stage for rank in ranks} == set(range(plan.pp))


def test_ranks_of_uneven_cuts_have_bars_of_their_own() -> None:
    # 8 KV groups over 3 ranks are 3, 3 and 2.
    ranks = list_rank_memory(predict_one(PlanConfig(tp=3)))
    assert len(ranks) > 1
    assert ranks[0].first == 0
    assert ranks[-1].last == 2
    assert sum(ranks[-1].parts.values()) < sum(ranks[0].parts.values())


def test_ranks_of_even_cuts_share_one() -> None:
    (only,) = list_rank_memory(predict_one(PlanConfig(tp=4)))
    assert (only.first, only.last) == (0, 3)
