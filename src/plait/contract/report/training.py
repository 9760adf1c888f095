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
from plait.dtype import width_bytes


@dataclass(frozen=True)
class StepTally:
    """Totals of one rank; what is kept for backward is freed before the next micro-batch.

    Attributes:
        state_bytes: of its parameters, their gradients and what the optimizer keeps of them, between steps.
    """

    num_parameters: int
    state_bytes: int
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
    num_parameters = count_parameters(contract, parts)
    return StepTally(
        num_parameters=num_parameters,
        state_bytes=_count_state_bytes(run, num_parameters),
        block=build_tally(contract.block),
        micro_batch=micro_batch,
        flops=micro_batch.flops * repeats,
        collectives=issued * repeats + once,
    )


def _count_state_bytes(run: RunConfig, num_parameters: int) -> int:
    """Masters, gradients and two moments in float32, or in what is wider; beside them parameters of a narrower format.

    Of what dp_shard shares out a rank has its share, and no parameter is whole for longer than it is used.
    """
    width, shards = width_bytes(run.precision.compute), run.parallel.mesh_shape.degree("dp_shard_cp")
    master = max(width, width_bytes("float32"))
    if run.parallel.dp_shard > 1:
        return 4 * master * num_parameters // shards
    return (4 * master + (width if width < master else 0)) * num_parameters


def _list_backward(run: RunConfig) -> tuple[Work, ...]:
    is_split = run.parallel.pp > 1 and run.pipeline.schedule == "zero_bubble"
    return (Work.INPUT_BACKWARD, Work.WEIGHT_BACKWARD) if is_split else (Work.BACKWARD,)
