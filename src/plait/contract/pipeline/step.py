"""What a rank of a pipeline issues and sends in an optimizer step of a run."""

from collections.abc import Sequence

from plait.config.run import RunConfig
from plait.contract.collective import Collective
from plait.contract.model import ModelContract
from plait.contract.pipeline.order import Pipeline, Work
from plait.contract.pipeline.stage import StageContract
from plait.contract.pipeline.stream import derive_stream_shape
from plait.contract.pipeline.transfer import Transfer
from plait.contract.setting import Setting
from plait.sharding import StagePart, select_parts

_BACKWARD = (Work.BACKWARD, Work.INPUT_BACKWARD)


def build_pipeline(run: RunConfig) -> Pipeline:
    """The order of work of a run; a pipeline of one stage on a mesh without one."""
    asked = run.pipeline
    schedule = asked.schedule if run.parallel.pp > 1 else "1f1b"
    return Pipeline(schedule, run.parallel.pp, asked.stages_per_rank, run.train.gradient_accumulation)


def select_run_parts(run: RunConfig, pp_rank: int) -> tuple[StagePart, ...]:
    """What pp rank `pp_rank` holds, stage by stage."""
    return select_parts(run.model.num_layers, run.parallel.pp, run.pipeline.stages_per_rank, pp_rank)


def derive_stage_collectives(
    run: RunConfig, contracts: Sequence[ModelContract], pp_rank: int
) -> tuple[Collective, ...]:
    """What the rank issues for the micro-batches of a step, one of `contracts` each, in the order of its work."""
    parts = select_run_parts(run, pp_rank)
    stages = {
        (part.index, contract): StageContract(contract, part) for part in parts for contract in dict.fromkeys(contracts)
    }
    works = [
        (stages[action.stage, contracts[action.micro_batch]], action.work)
        for action in build_pipeline(run).list_actions(pp_rank)
    ]
    return tuple(each for stage, work in works for each in stage.list_collectives(work))


def derive_transfers(run: RunConfig, setting: Setting, pp_rank: int) -> tuple[Transfer, ...]:
    """What pp rank `pp_rank` receives and sends in a step, in order: before and after what it is for."""
    pipeline, shape = build_pipeline(run), derive_stream_shape(setting, run.model.width)
    last = pipeline.num_stages - 1
    transfers: list[Transfer] = []
    for action in pipeline.list_actions(pp_rank):
        stage, micro_batch = action.stage, action.micro_batch
        if action.work is Work.FORWARD:
            if stage > 0:
                transfers.append(
                    Transfer("received", "activation", stage - 1, stage, micro_batch, shape, setting.dtype)
                )
            if stage < last:
                transfers.append(Transfer("sent", "activation", stage, stage + 1, micro_batch, shape, setting.dtype))
        elif action.work in _BACKWARD:
            if stage < last:
                transfers.append(Transfer("received", "gradient", stage + 1, stage, micro_batch, shape, setting.dtype))
            if stage > 0:
                transfers.append(Transfer("sent", "gradient", stage, stage - 1, micro_batch, shape, setting.dtype))
    return tuple(transfers)
