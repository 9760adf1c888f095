"""What a rank is to issue in the step that is verified: of a packed batch that depends on where its documents end."""

from plait.config.run import AnyRun, RunConfig
from plait.contract.collective import Collective
from plait.contract.context.attention import build_plan
from plait.contract.context.mask import AttentionMask
from plait.contract.context.traffic import DKV, KV
from plait.contract.pipeline.order import Work
from plait.contract.pipeline.step import build_pipeline, select_run_parts
from plait.contract.training import derive_run_model, derive_step_collectives
from plait.schedule.context import RingProgram, build_ring_backward, build_ring_forward
from plait.sharding.token_order import Order, build_order
from plait.verify.runtime.recipe import CALIBRATED, Phase, list_phases
from plait.verify.runtime.workload import list_micro_batches
from plait.verify.static.trace import Moved, list_promised_messages


def list_promised_collectives(config: RunConfig, rank: int, phase: Phase) -> tuple[Collective, ...]:
    """Those of global rank `rank` in one step, in order."""
    place = config.parallel.mesh_shape.coordinates(rank)
    contracts = [
        derive_run_model(config, place.tp, place.cp, mask=mask, is_calibrated=phase is CALIBRATED)
        for mask in list_masks(config, rank, phase)
    ]
    return derive_step_collectives(config, contracts[0], place.pp, micro_batches=contracts)


def list_ring_messages(config: RunConfig, rank: int) -> list[Moved]:
    """The messages of ring attention that global rank `rank` sends and waits for in all steps, in order."""
    place = config.parallel.mesh_shape.coordinates(rank)
    order = build_order(Order(config.context.order), config.seq_len, config.parallel.cp)
    num_blocks = {part.index: len(part.layers) for part in select_run_parts(config, place.pp)}
    programs: list[RingProgram] = []
    for phase in list_phases(config):
        masks = list_masks(config, rank, phase)
        for action in build_pipeline(config).list_actions(place.pp):
            needs = build_plan(order, masks[action.micro_batch], config.train.micro_batch_size).needs
            passes = [build_ring_forward(needs, order.split, place.cp)]
            if action.work is not Work.FORWARD:
                again = [] if config.train.recompute == "none" else passes
                passes = [*again, build_ring_backward(needs, order.split, place.cp)]
            if action.work is not _find_other_half(action.stage):
                programs += passes * num_blocks[action.stage]
    return list_promised_messages(programs)


def _find_other_half(stage: int) -> Work:
    """Of a backward that is split the part without attention: that of weights, or of the first stage that of inputs."""
    return Work.WEIGHT_BACKWARD if stage else Work.INPUT_BACKWARD


def is_of_ring(moved: Moved) -> bool:
    """Whether it is a message of ring attention, and not of a collective GEMM."""
    _, message = moved
    return message.tensor in (KV, DKV)


def list_masks(config: AnyRun, rank: int, phase: Phase) -> list[AttentionMask]:
    """What sees what in each micro-batch of the rank."""
    shape = config.parallel.mesh_shape
    place = shape.coordinates(rank)
    dp_rank = place.dp_replicate * shape.dp_shard + place.dp_shard
    return [AttentionMask(documents=batch.documents) for batch in list_micro_batches(config, dp_rank, phase.index)]
