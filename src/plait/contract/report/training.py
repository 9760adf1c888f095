"""What one rank does in an optimizer step of a run, added up."""

from dataclasses import dataclass

from plait.config.run import RunConfig
from plait.contract.axis.fsdp import count_moves
from plait.contract.model import ModelContract
from plait.contract.pipeline.order import Work
from plait.contract.pipeline.stage import StageContract, count_parameters
from plait.contract.pipeline.step import select_run_parts
from plait.contract.report.tally import CollectiveTally, Tally, build_tally, count_collectives, count_messages
from plait.contract.training import derive_closing_collectives


@dataclass(frozen=True)
class StepTally:
    """Totals of one rank; what is kept for backward is freed before the next micro-batch."""

    num_parameters: int
    block: Tally
    micro_batch: Tally
    flops: int
    collectives: CollectiveTally


def build_step_tally(run: RunConfig, contract: ModelContract, pp_rank: int = 0) -> StepTally:
    """Add a step of `run` up; of a pipeline that of the stages on pp rank `pp_rank`."""
    parts = select_run_parts(run, pp_rank)
    stages = [StageContract(contract, part) for part in parts]
    ops = [op for stage in stages for op in stage.ops]
    micro_batch = build_tally(ops)
    works = [Work.FORWARD, *_list_backward(run)]
    issued = count_collectives(each for stage in stages for work in works for each in stage.list_collectives(work))
    issued += count_messages(step for op in ops for step in (*op.forward, *op.again, *op.backward))
    repeats = run.train.gradient_accumulation
    once = count_collectives(derive_closing_collectives(run, contract, pp_rank))
    for collective, times in count_moves(run, contract, pp_rank):
        once += count_collectives([collective]) * times
    return StepTally(
        num_parameters=count_parameters(contract, parts),
        block=build_tally(contract.block),
        micro_batch=micro_batch,
        flops=micro_batch.flops * repeats,
        collectives=issued * repeats + once,
    )


def _list_backward(run: RunConfig) -> tuple[Work, ...]:
    is_split = run.parallel.pp > 1 and run.pipeline.schedule == "zero_bubble"
    return (Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD) if is_split else (Work.BACKWARD,)
