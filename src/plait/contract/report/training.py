"""What one rank does in an optimizer step of a run, added up."""

from dataclasses import dataclass

from plait.config.run import RunConfig
from plait.contract.axis.fsdp import count_moves
from plait.contract.model import ModelContract
from plait.contract.report.tally import CollectiveTally, Tally, build_tally, count_collectives
from plait.contract.training import derive_closing_collectives


@dataclass(frozen=True)
class StepTally:
    """Totals of one rank; what is kept for backward is freed before the next micro-batch."""

    num_parameters: int
    block: Tally
    micro_batch: Tally
    flops: int
    collectives: CollectiveTally


def build_step_tally(run: RunConfig, contract: ModelContract) -> StepTally:
    """Add a step of `run` up."""
    block, num_kept = build_tally(contract.block), sum(map(contract.is_kept, range(run.model.num_layers)))
    blocks = block * (run.model.num_layers - num_kept) + build_tally(contract.kept_block) * num_kept
    micro_batch = blocks + build_tally((*contract.entry, *contract.exit, contract.loss))
    repeats = run.train.gradient_accumulation
    once = count_collectives(derive_closing_collectives(run, contract))
    for collective, times in count_moves(run, contract):
        once += count_collectives([collective]) * times
    return StepTally(
        num_parameters=contract.num_parameters,
        block=block,
        micro_batch=micro_batch,
        flops=micro_batch.flops * repeats,
        collectives=(micro_batch.forward + micro_batch.backward) * repeats + once,
    )
