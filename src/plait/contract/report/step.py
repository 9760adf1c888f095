"""What one rank does in an optimizer step of a run, added up."""

from dataclasses import dataclass

from plait.config.run import RunConfig
from plait.contract.model import ModelContract
from plait.contract.report.tally import CollectiveTally, build_tally, count_collectives
from plait.contract.training import derive_step_collectives


@dataclass(frozen=True)
class StepTally:
    """Totals of one rank."""

    num_parameters: int
    flops: int
    collectives: CollectiveTally
    saved_bytes_per_block: int
    saved_bytes: int
    """Of one micro-batch: they are freed before the next."""


def build_step_tally(run: RunConfig, contract: ModelContract) -> StepTally:
    """Add a step of `run` up."""
    micro_batch, block = build_tally(contract.ops), build_tally(contract.block)
    return StepTally(
        num_parameters=contract.num_parameters,
        flops=(micro_batch.forward_flops + micro_batch.backward_flops) * run.train.gradient_accumulation,
        collectives=count_collectives(derive_step_collectives(run, contract)),
        saved_bytes_per_block=block.saved_bytes,
        saved_bytes=micro_batch.saved_bytes,
    )
