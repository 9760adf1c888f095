"""The ranks of a pipeline beside each other: what each holds, computes, keeps and sends, and for how long it waits."""

from dataclasses import dataclass

from plait.config.run import RunConfig
from plait.contract.model import ModelContract
from plait.contract.pipeline.clock import simulate
from plait.contract.pipeline.order import Action, Pipeline, Work
from plait.contract.pipeline.stage import StageContract, count_parameters
from plait.contract.pipeline.step import build_pipeline, derive_transfers, select_run_parts
from plait.sharding import StagePart


@dataclass(frozen=True)
class RankStages:
    """One pp rank, at one place on tp.

    Attributes:
        flops: of a step.
        saved_bytes: the most that it keeps for backward at a time, of all micro-batches under way.
        num_sends: tensors that it sends to neighbours in a step.
        idle_share: the part of a step in which it waits, if all FLOPs take as long and messages nothing.
    """

    parts: tuple[StagePart, ...]
    num_parameters: int
    flops: int
    saved_bytes: int
    num_sends: int
    sent_bytes: int
    idle_share: float


@dataclass(frozen=True)
class PipelineReport:
    """All ranks of a pipeline, and the share of their time in which they wait."""

    pipeline: Pipeline
    bubble: float
    ranks: tuple[RankStages, ...]

    @property
    def busiest(self) -> int:
        """The rank that computes most."""
        flops = [rank.flops for rank in self.ranks]
        return flops.index(max(flops))


def build_pipeline_report(run: RunConfig, contract: ModelContract) -> PipelineReport:
    """What the ranks of the pipeline do that are where the rank of `contract` is on tp."""
    pipeline = build_pipeline(run)
    parts = [select_run_parts(run, rank) for rank in range(pipeline.pp)]
    stages = {part.index: StageContract(contract, part) for own in parts for part in own}

    def count_flops(action: Action) -> float:
        return stages[action.stage].count_flops(action.work)

    times = simulate(pipeline, count_flops)
    ranks = []
    for rank, own in enumerate(parts):
        sent = [each for each in derive_transfers(run, contract.setting, rank) if each.direction == "sent"]
        ranks.append(
            RankStages(
                own,
                count_parameters(contract, own),
                int(times.busy_s[rank]),
                _find_most_saved(pipeline, stages, rank),
                len(sent),
                sum(each.num_bytes for each in sent),
                times.idle_shares[rank],
            )
        )
    return PipelineReport(pipeline, times.bubble, tuple(ranks))


def _find_most_saved(pipeline: Pipeline, stages: dict[int, StageContract], rank: int) -> int:
    """What a forward keeps is there until the last half of its backward."""
    held, most = 0, 0
    for action in pipeline.list_actions(rank):
        saved = sum(op.saved_bytes for op in stages[action.stage].ops)
        match action.work:
            case Work.FORWARD:
                held += saved
            case Work.BACKWARD | Work.WEIGHT_BACKWARD:
                held -= saved
            case Work.INPUT_BACKWARD:
                pass
        most = max(most, held)
    return most
